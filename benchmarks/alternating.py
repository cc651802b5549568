"""Times steps side by side on ranks: contenders take turns in rounds, and the slowest rank counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.choice_statistics import rotated

_WARM_UP, _LEAST_CALLS = 3, 3


class Alternating:
    """Contenders on this rank: a name, and a call of its step.

    Args:
        calls: by name; each takes a step, and every rank makes the same ones.
        turn_seconds: of a turn, about.
    """

    def __init__(self, calls: dict[str, Callable[[], Any]], turn_seconds: float) -> None:
        self.calls = calls
        self.counts = {name: self._count(call, turn_seconds) for name, call in calls.items()}

    def _count(self, call: Callable[[], Any], turn_seconds: float) -> int:
        for _ in range(_WARM_UP):
            call()
        return max(_LEAST_CALLS, round(turn_seconds / slowest(_seconds(call))))

    def rounds(self, names: Sequence[str], count: int) -> dict[str, list[float]]:
        """Seconds of a step by name, for each round the median of a turn on the slowest rank."""
        found: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(count):
            for name in rotated(names, turn):
                call = self.calls[name]
                call()  # caches are another contender's
                times = [_seconds(call) for _ in range(self.counts[name])]
                found[name].append(slowest(statistics.median(times)))
        return found


def slowest(value: float) -> float:
    """The largest value of all ranks."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
