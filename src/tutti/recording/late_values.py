"""Values of steps without a wait: those on a GPU are copied beside its work, and read once they are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class RowsUnderWay:
    """Rows whose values on a GPU are on their way to `host`; `done` is recorded behind the copy."""

    rows: list[Sequence[Any]]
    host: Tensor
    done: Any


class LateValues:
    """Rows of numbers and tensors of one number go in, rows of numbers come out, in order."""

    def __init__(self) -> None:
        self._waiting: list[RowsUnderWay] = []

    def read(self, rows: list[Sequence[Any]], *, wait: bool = False) -> list[list[float]]:
        """The rows that are known now, as numbers: earlier ones, then `rows`, unless some are on a GPU."""
        if any(_is_far(x) for row in rows for x in row):
            self._waiting.append(_begun(rows))
            rows = []
        elif not self._waiting:
            return [[_number(x) for x in row] for row in rows]
        elif rows:
            self._waiting.append(RowsUnderWay(rows, torch.empty(0), None))
        known: list[list[float]] = []
        while self._waiting and (wait or _is_done(self._waiting[0])):
            known += _numbers(self._waiting.pop(0))
        return known


def _is_far(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_cpu


def _number(x: Any) -> float:
    return x.item() if isinstance(x, Tensor) else x


def _begun(rows: list[Sequence[Any]]) -> RowsUnderWay:
    far = [x.detach().reshape(()).double() for row in rows for x in row if _is_far(x)]
    device = far[0].device
    stacked = torch.stack([x.to(device) for x in far])
    if device.type != "cuda":
        return RowsUnderWay(rows, stacked.cpu(), None)
    host = torch.empty(len(far), dtype=torch.float64, pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return RowsUnderWay(rows, host, done)


def _is_done(one: RowsUnderWay) -> bool:
    return one.done is None or one.done.query()


def _numbers(one: RowsUnderWay) -> list[list[float]]:
    if one.done is not None:
        one.done.synchronize()
    far = iter(one.host.tolist())
    return [[next(far) if _is_far(x) else _number(x) for x in row] for row in one.rows]
