"""Workers of parameter servers on a clock: throughput and staleness.

    worker   pull | compute | push          again and again
    server   one push after the other

A worker's gradient is as stale as the number of updates between its pull and its push. `step`: workers wait
for all of a round. `bounded(s)`: the fastest is at most s rounds ahead of the slowest. `async`: nobody waits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.errors import PlanError


@dataclass(frozen=True)
class WorkersPlayed:
    """What the clock found.

    updates_per_second: of all workers. staleness: mean number of updates that a gradient has missed; `most`
    the largest. waiting: the share of the workers' time without compute.
    """

    updates_per_second: float
    staleness: float
    most: int
    waiting: float


def play_workers(
    compute: Sequence[float], serve: float, ahead: float, *, num_rounds: int = 200
) -> WorkersPlayed:
    """Play until every worker has played `num_rounds` rounds.

    Args:
        compute: seconds of each worker from a pull to a push.
        serve: seconds of a server for one push.
        ahead: rounds that a worker may be ahead of the slowest: 0 for `step`, infinity for `async`.
        num_rounds: of the slowest worker.

    Raises:
        PlanError: no workers, or a time that cannot be.
    """
    if not compute or min(compute) <= 0 or serve < 0 or ahead < 0:
        raise PlanError("workers need seconds of compute above 0", fix="one number for each worker")
    clock = _WorkerClock(list(compute), serve, ahead, num_rounds)
    return clock.play()


class _WorkerClock:
    def __init__(self, compute: list[float], serve: float, ahead: float, num_rounds: int) -> None:
        self.compute, self.serve, self.ahead, self.num_rounds = compute, serve, ahead, num_rounds
        self.rounds = [0] * len(compute)
        self.pulled = [0] * len(compute)
        self.version, self.free = 0, 0.0
        self.stale: list[int] = []
        self.end = 0.0

    def play(self) -> WorkersPlayed:
        events = [(seconds, worker) for worker, seconds in enumerate(self.compute)]
        heapq.heapify(events)
        waiting: list[int] = []
        while min(self.rounds) < self.num_rounds:
            now, worker = heapq.heappop(events)
            now = self._push(now, worker)
            waiting.append(worker)
            slowest = min(self.rounds)
            for one in [w for w in waiting if self._may_go(w, slowest)]:
                waiting.remove(one)
                self.pulled[one] = self.version
                heapq.heappush(events, (now + self.compute[one], one))
        busy = sum(c * n for c, n in zip(self.compute, self.rounds, strict=True))
        return WorkersPlayed(
            updates_per_second=len(self.stale) / self.end,
            staleness=math.fsum(self.stale) / len(self.stale),
            most=max(self.stale),
            waiting=max(0.0, 1 - busy / (self.end * len(self.compute))),
        )

    def _push(self, now: float, worker: int) -> float:
        """The time at which the server has taken the push of a worker."""
        self.free = max(now, self.free) + self.serve
        # In a synchronous round all gradients belong to one update.
        self.stale.append(0 if self.ahead == 0 else self.version - self.pulled[worker])
        self.version += 1
        self.rounds[worker] += 1
        self.end = max(self.end, self.free)
        return self.free

    def _may_go(self, worker: int, slowest: int) -> bool:
        return self.rounds[worker] - slowest <= self.ahead
