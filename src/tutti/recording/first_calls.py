"""Measures the first calls of a step: their memory and their time.

call 1          makes the program
call 2          its program plays under the profiler of memory, once; a capture does not
calls 3 to 5    are timed: their median is the measured step
"""

from __future__ import annotations

import statistics
import time
from typing import Protocol

from tutti.torch_private.profilers import profiler_is_used

MEASURED_CALL, NUM_TIMED = 2, 3


class Measurable(Protocol):
    """What is read of a program."""

    measured: int | None


class FirstCalls:
    """The first calls of one program in a row; another program begins anew.

    Args:
        wants_memory: measure the memory of a call.
        wants_seconds: keep the times of calls.
    """

    def __init__(self, *, wants_memory: bool, wants_seconds: bool) -> None:
        self.wants_memory, self.wants_seconds = wants_memory, wants_seconds
        self.measuring = False
        self.program: Measurable | None = None
        self.num_calls = 0  # of the current program, in a row
        self._timed: list[float] = []
        self._begun = self._ended = time.perf_counter()

    def begins(self) -> None:
        """A call begins."""
        self.measuring = False
        self._begun = time.perf_counter()

    def measures(self, program: Measurable) -> bool:
        """Whether to measure the memory of `program`, which plays next. A user's profiler stays alone."""
        again = program is self.program and self.num_calls == MEASURED_CALL - 1
        if self.wants_memory and again:
            self.measuring = self.wants_memory = not profiler_is_used()
        return self.measuring

    def seconds(self, now: float, *, on_gpu: bool) -> float:
        """Of the call that ends now. One on a GPU ends before its work: from one call's end to the next it
        takes no less."""
        return now - (self._ended if on_gpu and self.num_calls else self._begun)

    def ended(self) -> None:
        """All that belongs to a call has ended."""
        self._ended = time.perf_counter()

    def change(self, program: Measurable | None) -> None:
        """A first call of `program`; None after an eager one."""
        self.program, self.num_calls = program, 1
        self._timed.clear()

    def add(self, seconds: float) -> float | None:
        """One more call of the same program; the measured step, once it is known."""
        self.num_calls += 1
        if self.measuring:
            self.wants_memory = False
        elif self.wants_seconds:
            self._timed.append(seconds)
            if len(self._timed) == NUM_TIMED:
                self.wants_seconds = False
                return statistics.median(self._timed)
        return None
