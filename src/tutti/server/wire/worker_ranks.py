"""The ranks of one worker: the first communicates with the servers, for all of them.

servers  <-->  worker 0        worker 0.1
               first rank  -->  other ranks    weights, numbers, sums
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from tutti.comm.collectives import transport
from tutti.comm.collectives.exchange import broadcast_first, exchange_texts
from tutti.comm.collectives.group import Group
from tutti.errors import LayoutError

Total = Callable[[Tensor], Tensor]


class WorkerRanks:
    """This rank's view of its worker's ranks, which are its process group; all call together.

    Args:
        size: the layout's number of ranks per worker.

    Raises:
        LayoutError: the process group has another size.
    """

    def __init__(self, size: int) -> None:
        several = dist.is_initialized()
        self.size = dist.get_world_size() if several else 1
        self.rank = dist.get_rank() if several else 0
        if self.size != size:
            raise LayoutError(
                f"a worker of this layout has {size} ranks, and {self.size} have met",
                why="the ranks of a worker are started together, on one host",
                fix="tutti run --layout ... SCRIPT",
            )

    @property
    def speaks(self) -> bool:
        """Whether this is the rank that communicates with the servers."""
        return self.rank == 0

    def share(self, x: Tensor) -> None:
        """Broadcast `x`, contiguous, from the first rank."""
        if self.size > 1:
            broadcast_first(x)

    def told(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The first rank's `numbers`, by name."""
        if self.size == 1:
            return dict(numbers)
        return json.loads(exchange_texts(json.dumps(dict(numbers)), Group.world())[0])

    def some_say(self, words: Sequence[str]) -> list[str]:
        """The words of all ranks, each once, in the order of the ranks."""
        if self.size == 1:
            return list(words)
        said = exchange_texts(json.dumps(list(words)), Group.world())
        return list(dict.fromkeys(word for text in said for word in json.loads(text)))

    def sum(self, x: Tensor, total: Total) -> Tensor:
        """The sum of this rank's `x` (1-D, on the CPU) by `total`, which the first rank calls for all."""
        if self.size == 1:
            return total(x)
        rows = transport.all_gather(x, Group.world())
        if self.speaks:
            rows = total(rows.flatten()).view_as(rows).contiguous()
        self.share(rows)
        return rows[self.rank]
