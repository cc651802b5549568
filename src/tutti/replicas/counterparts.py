"""The counterparts of a rank: the rank at its place in each of the other replicas.

replica 0   rank 0   rank 1
replica 1   rank 2   rank 3      rank 1 and rank 3 are counterparts
"""

from __future__ import annotations

from collections.abc import Sequence

from tutti.comm.posts.post import RankPost

LOOK_SECONDS = 0.5


class Counterparts:
    """A rank that sends letters to its counterparts, and waits for theirs.

    Args:
        ranks: the rank of each replica.
        replica: this one.
        timeout_seconds: how long to wait for a live replica.

    Attributes:
        post: sends the letters; whoever builds this sets it before any other call.
    """

    def __init__(self, ranks: Sequence[int], replica: int, timeout_seconds: float) -> None:
        self._ranks, self._replica, self._timeout = list(ranks), replica, timeout_seconds
        self.post: RankPost | None = None

    def _the_post(self) -> RankPost:
        assert self.post is not None
        return self.post

    def _is_here(self, replica: int) -> bool:
        return replica == self._replica or self._the_post().is_here(self._ranks[replica])
