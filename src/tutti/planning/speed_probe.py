"""A fixed piece of work that tells how fast the processor is at the moment.

Shared processors change their speed by tens of percent within seconds. Times of kernels count relative to the
probe before and after them, so graphs that were timed minutes apart can be compared, and a calibration of
another day with both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_REPEATS = 5


class SpeedProbe:
    """A matmul and a sum that leaves the first cache: half a millisecond on one thread, a few times over."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._x, self._weight = torch.ones(128, 512), torch.ones(512, 512)
        self._large, self._out = torch.ones(1 << 18), torch.empty(1 << 18)
        self._product = torch.empty(128, 512)

    def __call__(self) -> float:
        """Seconds of the work now, the median of some repetitions."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return statistics.median(self._once() for _ in range(_REPEATS))
        finally:
            torch.set_num_threads(threads)

    def _once(self) -> float:
        begin = self._now()
        torch.mm(self._x, self._weight, out=self._product)
        torch.add(self._large, 1.0, out=self._out)
        return self._now() - begin
