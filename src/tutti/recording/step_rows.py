"""The rows of one step's calls until they are written: the file of the process keeps them, not the step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tutti.recording.late_values import LateValues
from tutti.recording.run_writer import RunWriter
from tutti.recording.step_points import StepPoints

FLUSH_SECONDS = 0.5
MOST_NAN_EVENTS = 20


class StepRows:
    """Rows of (step, time, seconds, scalars), written as points twice a second and at the end.

    Args:
        out: the file of this process.
        number: of the step.
    """

    def __init__(self, out: RunWriter, number: int) -> None:
        self._out, self._number = out, number
        self._late, self._points = LateValues(), StepPoints()
        self._rows: list[Sequence[Any]] = []
        self._names: tuple[str, ...] = ()
        self._num_nans = 0
        self._written = time.perf_counter()
        self._epoch = time.time() - time.perf_counter() - out.began
        out.before_end(self.write_all)

    def add(
        self, step: int, now: float, seconds: float, names: tuple[str, ...], values: Sequence[Any]
    ) -> None:
        """A call that has ended `now` (of `perf_counter`), with the scalars that it returned."""
        if names != self._names:
            self.write_all()
            self._names = names
        self._rows.append((step, now, seconds, *map(_read, values)))
        if now - self._written > FLUSH_SECONDS:
            self._write()

    def write_all(self) -> None:
        """Write all rows, also those that are on their way from a GPU."""
        self._write(wait=True)
        self._put(self._points.rest())

    def _write(self, *, wait: bool = False) -> None:
        self._written = time.perf_counter()
        rows, self._rows = self._rows, []
        known = self._late.read(rows, wait=wait)
        for row in known:
            self._note_nans(row)
        self._put(self._points.joined(known))

    def _put(self, points: list[list[float]]) -> None:
        if not points:
            return
        written = [
            [int(p[0]), round(p[1] + self._epoch, 3), *(float(f"{x:.6g}") for x in p[2:])]
            for p in points
        ]
        self._out.write("steps", of=self._number, names=self._names, points=written)

    def _note_nans(self, row: Sequence[float]) -> None:
        for name, value in zip(self._names, row[3:], strict=True):
            if not math.isfinite(value):
                self._num_nans += 1
                if self._num_nans <= MOST_NAN_EVENTS:
                    shown = {"of": self._number, "step": int(row[0]), "name": name}
                    self._out.write("nan", **shown, value=value)


def _read(x: Tensor | float) -> Tensor | float:
    """A number; what is on a GPU is read later."""
    if isinstance(x, Tensor):
        return x.item() if x.is_cpu else x.detach()
    return x
