"""A group of torch.distributed among some ranks of a run, made within `TUTTI_TIMEOUT`.

The ranks of a group find each other through the run's store. If the network no longer carries anything to
the host of that store, PyTorch waits for an answer without a limit: a thread waits in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tutti.comm.collectives.failure import named_ranks, reason_of
from tutti.comm.collectives.group import Group, collective_timeout
from tutti.comm.host.bounded_call import bounded
from tutti.errors import CommError
from tutti.torch_private.named_group import named_group

# Beyond `TUTTI_TIMEOUT`, after which PyTorch itself reports a rank that does not come.
_MORE_SECONDS = 2.0
# How many groups of the same ranks this process has made in a run, by the run's own group.
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def fresh_group(ranks: Sequence[int], *, backend: str | None = None) -> Group:
    """A new group of `ranks`, this one among them; they alone call this together.

    Args:
        ranks: ascending.
        backend: of the group; by default, that of the run.

    Raises:
        CommError: a rank does not come, or the run's store does not answer, within `TUTTI_TIMEOUT`.
    """
    me, key = dist.get_rank(), tuple(ranks)
    if len(key) == 1:
        return Group.of(None, key, me)
    assert dist.group.WORLD is not None
    counts = _made.setdefault(dist.group.WORLD, Counter())
    counts[key] += 1
    name = f"tutti {' '.join(map(str, key))}: {counts[key]}"
    seconds = collective_timeout().total_seconds()
    try:
        made = bounded(
            lambda: named_group(key, name, collective_timeout(), backend),
            seconds + _MORE_SECONDS,
            "tutti-group",
        )
    except Exception as error:
        late = isinstance(error, TimeoutError)
        others = named_ranks([rank for rank in key if rank != me])
        raise CommError(
            f"rank {me} has made no group with {others} within {seconds:g} s",
            why="the store of the run does not answer" if late else reason_of(error),
            fix="see whether the host of rank 0 can be reached, and whether each rank still lives",
        ) from (None if late else error)
    return Group.of(made, key, me)
