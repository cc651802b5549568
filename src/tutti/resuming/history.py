"""The metrics of a run, by name, without a wait for a GPU at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.errors import TuttiError

STEP = "step"
# Tensors that wait for their conversion: each takes 512 bytes of a GPU.
_MOST_WAITING = 1000


class History:
    """A column of numbers for each metric, and the column "step"; NaN where a step has no such metric."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {STEP: []}
        self._waiting: list[tuple[str, int, Tensor]] = []  # metric, row, value on a device
        self._last: dict[str, int] = {}  # by metric, the row of the last value that was given

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a row.

        Raises:
            TuttiError: a metric is neither a number nor a tensor of one number; names it.
        """
        found = {name: _number(name, value) for name, value in metrics.items()}
        row = len(self._columns[STEP])
        self._columns[STEP].append(step)
        self._last |= dict.fromkeys(found, row)
        for name in found.keys() - self._columns.keys():
            self._columns[name] = [math.nan] * row
        for name, column in self._columns.items():
            if name == STEP:
                continue
            value = found.get(name, math.nan)
            if isinstance(value, Tensor):
                self._waiting.append((name, row, value))
                value = math.nan
            column.append(value)
        if len(self._waiting) > _MOST_WAITING:
            self._convert()

    def columns(self) -> dict[str, list[Any]]:
        """Lists of equal lengths by name."""
        self._convert()
        return self._columns

    def latest(self, since: int) -> dict[str, float]:
        """The last number of each metric that was given after step `since`."""
        columns, found = self.columns(), {}
        for name, row in self._last.items():
            if columns[STEP][row] > since and math.isnan(columns[name][row]):
                found[name] = math.nan
        for name in columns.keys() - {STEP, *found}:
            for step, value in zip(reversed(columns[STEP]), reversed(columns[name]), strict=True):
                if step <= since:
                    break
                if not math.isnan(value):
                    found[name] = value
                    break
        return {name: found[name] for name in columns if name in found}

    def state(self) -> dict[str, Tensor]:
        """The columns as tensors."""
        kinds = {STEP: torch.int64}
        found = self.columns()
        return {n: torch.tensor(x, dtype=kinds.get(n, torch.float64)) for n, x in found.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the columns of a save."""
        self._waiting.clear()
        self._last.clear()
        self._columns = {STEP: []} | {name: x.tolist() for name, x in state.items()}

    def _convert(self) -> None:
        """Read the waiting tensors: one wait for each device."""
        by_device: dict[Any, list[tuple[str, int, Tensor]]] = {}
        for one in self._waiting:
            by_device.setdefault(one[2].device, []).append(one)
        self._waiting.clear()
        for found in by_device.values():
            values = torch.stack([x for _, _, x in found]).tolist()
            for (name, row, _), value in zip(found, values, strict=True):
                self._columns[name][row] = value


def _number(name: str, value: Any) -> float | Tensor:
    """The value as a float, or as a copy on its device: a step may write its results into the same memory."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        value = value.detach().reshape(())
        return value.item() if value.is_cpu else value.to(torch.float64, copy=True)
    try:
        if name != STEP and not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    what = "this name is taken" if name == STEP else f"it is a {type(value).__name__}"
    raise TuttiError(
        f'the metric "{name}" cannot be kept',
        why=what,
        fix="numbers and tensors with one number: run.tick(loss=loss)",
    )
