"""The processor's speed over a plan: every layout has its estimate at the same one.

A shared processor changes its speed while a plan times kernels. So all estimates are made at one speed, that
of the calibration, and in the end all of them are as much slower or faster as the processor was meanwhile:

    a kernel      its time in probes x the probe's seconds at the calibration
    links, calls  as calibrated
    in the end    x the probe's seconds over all graphs / those at the calibration
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property


class ProcessorSpeed:
    """Seconds of the speed probe while a plan timed its graphs.

    Processes slow each other down. The graphs of layouts with fewer processes run at other moments, so what
    counts is the probe beside the others relative to the probe alone just before.

    Args:
        probe_seconds: of the probe at the speed of all estimates; by default beside the first graph.
        fixed: links do not change with the processor, so estimates keep the speed at which they are made.
    """

    def __init__(self, probe_seconds: float | None = None, *, fixed: bool = False) -> None:
        self._made_at, self._fixed = probe_seconds, fixed or probe_seconds is None
        self._alone: list[float] = []
        self._crowding: defaultdict[int, list[float]] = defaultdict(list)

    @property
    def probe_seconds(self) -> float:
        """Of the probe, in all estimates; 0 before the first graph of a machine without a calibrated one."""
        return self._made_at or 0.0

    def add(self, num_processes: int, alone: float, probes: Sequence[float]) -> None:
        """The probe's seconds for one graph: before the other processes began, and beside them."""
        beside = statistics.median(probes)
        self._made_at = self._made_at or beside
        self._alone.append(alone)
        self._crowding[num_processes].append(beside / alone if num_processes > 1 else 1.0)

    def factor(self, num_processes: int) -> float:
        """How many times as long as estimated a step of so many processes takes; the first call settles it
        for all."""
        crowding, now = self._settled
        return now * crowding.get(num_processes, 1.0) if crowding else 1.0

    @cached_property
    def _settled(self) -> tuple[dict[int, float], float]:
        crowding = {number: statistics.median(x) for number, x in self._crowding.items()}
        if not crowding:
            return {}, 1.0
        if self._fixed:  # the estimates of most processes: the speed is theirs
            return crowding, 1.0 / crowding[max(crowding)]
        return crowding, statistics.median(self._alone) / self.probe_seconds
