"""A valid order of the actions of all ranks, or a cycle of waiting ranks.

A rank plays its row in order. A send is posted and the rank continues; a receive waits for its send. A
blocking send also waits until the receiver reaches its receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import Action
from tutti.pipeline.schedule.schedule import Schedule


def playing_order(
    schedule: Schedule, *, blocking_sends: bool = False
) -> Iterator[tuple[int, Action]]:
    """All actions with their ranks, each after those for which it waits; a receive after its send.

    Every receive must have its send. Raises `ScheduleError` with the cycle if ranks wait for each other.
    """
    progress = _Progress(schedule, blocking_sends)
    awake = deque(range(schedule.num_ranks))
    while awake:
        rank = awake.popleft()
        while progress.can_go(rank):
            action = progress.go(rank)
            yield rank, action
            if action.kind == "S":
                awake.append(schedule.rank_of(action.peer))
        if (action := progress.head(rank)) is not None and action.kind == "R":
            # A blocking send waited for this rank to reach its receive.
            sender = schedule.rank_of(action.peer)
            if progress.head(sender) == action.counterpart:
                awake.append(sender)
    progress.check_ended()


class _Progress:
    """The position of each rank in its row."""

    def __init__(self, schedule: Schedule, blocking_sends: bool) -> None:
        self.schedule, self.blocking = schedule, blocking_sends
        self.done = [0] * schedule.num_ranks
        self.sent: set[Action] = set()

    def head(self, rank: int) -> Action | None:
        """The next action of the rank."""
        row = self.schedule.rows[rank]
        return row[self.done[rank]] if self.done[rank] < len(row) else None

    def can_go(self, rank: int) -> bool:
        action = self.head(rank)
        if action is None:
            return False
        if action.kind == "R":
            return action.counterpart in self.sent
        if action.kind == "S" and self.blocking:
            return self.head(self.schedule.rank_of(action.peer)) == action.counterpart
        return True

    def go(self, rank: int) -> Action:
        action = self.schedule.rows[rank][self.done[rank]]
        self.done[rank] += 1
        if action.kind == "S":
            self.sent.add(action)
        return action

    def check_ended(self) -> None:
        """Raise `ScheduleError` unless every rank is at its end."""
        stuck = [rank for rank in range(self.schedule.num_ranks) if self.head(rank) is not None]
        if not stuck:
            return
        circle = self._circle(stuck[0])
        raise ScheduleError(
            f"deadlock: {len(circle)} ranks wait for each other",
            at=self._position_text(circle[0]),
            why="; ".join(map(self._waits, circle)),
            fix="change the order of one of these rows"
            + (", or give the streams a buffer" if self.blocking else ""),
        )

    def _waited_for(self, rank: int) -> int:
        action = self.head(rank)
        assert action is not None and action.kind in ("S", "R"), (rank, action)
        return self.schedule.rank_of(action.peer)

    def _circle(self, rank: int) -> list[int]:
        """The ranks of the cycle to which the waits of `rank` lead."""
        path = []
        while rank not in path:
            path.append(rank)
            rank = self._waited_for(rank)
        return path[path.index(rank) :]

    def _position_text(self, rank: int) -> str:
        return f"rank {rank}, action {self.done[rank] + 1}: {self.head(rank)}"

    def _waits(self, rank: int) -> str:
        action = self.head(rank)
        assert action is not None
        other = self._waited_for(rank)
        what = "sends" if action.kind == "R" else "receives"
        return f"rank {rank} waits at {action} until rank {other} {what} ({action.counterpart})"
