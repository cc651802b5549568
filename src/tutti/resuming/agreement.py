"""The requests of ranks, on which all act before the same step."""

from __future__ import annotations

import time

import torch.distributed as dist

from tutti.calls.running import Running
from tutti.comm.collectives.failure import without_frames
from tutti.comm.collectives.group import Group
from tutti.comm.collectives.votes import NUM_BITS, NamedVotes, votes_of
from tutti.errors import CommError
from tutti.saving import replica_checkpoint

NAME = "Checkpoints.tick"
# Steps from vote to vote. Replicas may be so many steps apart; ranks of one program are at most one apart.
REPLICA_STEPS = 8
# Votes between hosts take some time of their own: with short steps they are fewer.
SHORT_SECONDS, SHORT_STEPS = 0.05, 16
_LONG = 1 << NUM_BITS - 1


class Agreement:
    """The union of all ranks' votes, one round after they were given; all ranks make it together.

    A single rank acts at once. If a replica is lost, the remaining ones go on voting.

    Attributes:
        leads: whether this is the first remaining rank.
        num_votes: how many rounds there were; the same on all ranks.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self.leads = not dist.is_initialized() or dist.get_rank() == 0
        self._left = replica_checkpoint.replicas_left(running)
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._votes = votes_of(Group.world(), NAME) if several else None
        self._apart = running.agreeing is not None and running.job.layout.num_replicas > 1
        self._period = REPLICA_STEPS if self._apart else 1
        self.num_votes, self._num_ticks, self._since = 0, 0, time.monotonic()

    def agreed(self, vote: int, state: int = 0) -> int:
        """Enter this rank's vote of this step; return the union on which all ranks act now.

        Args:
            vote: requests: what is in the union now is not asked for again.
            state: bits that hold now, whatever is in the union.
        """
        if self._votes is None:
            self.num_votes += 1
            return vote | state
        self._num_ticks += 1
        if self._num_ticks < self._period:
            return 0
        now = time.monotonic()
        if (now - self._since) > SHORT_SECONDS * self._num_ticks:
            vote |= _LONG
        self.num_votes, self._num_ticks, self._since = self.num_votes + 1, 0, now
        found = self._take(self._votes)
        if self._votes is None:  # the others are lost since
            return (vote & ~_LONG) | state
        self._votes.give((vote & ~(found & ~_LONG)) | state)
        if not self._apart and not self._votes.shared and self.num_votes > 2:
            self._period = 1 if found & _LONG else SHORT_STEPS
        return found & ~_LONG

    def _take(self, votes: NamedVotes) -> int:
        try:
            return votes.take()
        except CommError as error:
            if len(self._left) == 1:
                raise
            failed = without_frames(error)
        votes.drop()
        left = replica_checkpoint.left_since(self._running, self._left)
        if left is None:
            raise failed
        self._left = left
        group = replica_checkpoint.group_of(self._running, left)
        assert group is not None
        self.leads = group.position == 0
        self._votes = votes_of(group, NAME) if group.size > 1 else None
        return 0
