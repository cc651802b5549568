"""One rank's group along some mesh axes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from tutti.environment import TIMEOUT


def collective_timeout() -> timedelta:
    """How long a collective waits for its peers: `TUTTI_TIMEOUT` seconds, 600 by default."""
    return timedelta(seconds=TIMEOUT.read())


@dataclass(frozen=True)
class Group:
    """This rank's group along some mesh axes.

    `ranks` are in the order of their coordinates along the axes, major to minor; `position` is this
    rank's index there. torch.distributed orders the members of a group by rank: if that order differs,
    `order[i]` is the index of `ranks[i]` in it, and None otherwise.
    """

    handle: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    position: int
    order: tuple[int, ...] | None

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    @classmethod
    def of(cls, handle: dist.ProcessGroup | None, ranks: tuple[int, ...], rank: int) -> Group:
        """The group of `ranks`, in this order, that `rank` belongs to."""
        order = tuple(sorted(ranks).index(r) for r in ranks)
        straight = order == tuple(range(len(ranks)))
        return cls(handle, ranks, ranks.index(rank), None if straight else order)

    @classmethod
    def world(cls) -> Group:
        """All ranks of the run."""
        ranks = tuple(range(dist.get_world_size()))
        return cls(dist.group.WORLD, ranks, dist.get_rank(), None)
