"""State that a step sets anew instead of writing into it: `self.mean = 0.9 * self.mean + x`, `p.data = y`.

A trace knows a state tensor by the object that stands for it, and would not see that another took its place.
What a step leaves there is therefore written into the state, as an assignment of values.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.capture.lift import Place, StateTensor
from tutti.capture.source import quoted, user_line
from tutti.errors import CaptureError

_DATA: Any = torch._C.TensorBase.data  # type: ignore[attr-defined]


def take_over(places: Sequence[Place], state: Mapping[int, StateTensor]) -> None:
    """Write into each state tensor what the step has put in its place.

    Args:
        state: by the id of the tensor that was put in its place.

    Raises:
        CaptureError: for a parameter, and for a value of another shape or dtype.
    """
    found: dict[int, list[Any]] = {}
    for place in places:
        found.setdefault(id(place.put), []).append(place.now())
    puts = {id(place.put): place.put for place in places}
    new: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for i, values in found.items():
            if all(value is puts[i] for value in values):
                continue
            _refuse_other(state[i], puts[i], values)
            new.append((puts[i], values[0].detach().clone()))  # two may have changed places
        for put, value in new:
            put.copy_(value)


def _refuse_other(entry: StateTensor, put: Tensor, values: list[Any]) -> None:
    if entry.kind == "parameter":
        raise CaptureError(
            f'the step replaces the parameter "{entry.name}"',
            why="the optimizer would go on with the one before",
            fix="with torch.no_grad(): parameter.copy_(value)",
        )
    if any(value is not values[0] for value in values):
        raise CaptureError(
            f'the step replaces "{entry.name}" in one of the modules that share it',
            why="from then on these would be two buffers",
            fix="buffer.copy_(value)",
        )
    value = values[0]
    if not isinstance(value, Tensor):
        raise CaptureError(
            f'the step replaces "{entry.name}" by {value!r:.40}',
            why="state keeps its shape and dtype: the next step is the same",
            fix="a tensor of the same shape",
        )
    _refuse_other_form(f'"{entry.name}"', put, value)


def _refuse_other_form(name: str, old: Tensor, new: Tensor, at: str = "") -> None:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise CaptureError(
            f"the step replaces {name}, {list(old.shape)} {old.dtype}, by {list(new.shape)} {new.dtype}",
            at=at,
            why="state keeps its shape and dtype: the next step is the same",
            fix="make it so from the beginning",
        )


@contextlib.contextmanager
def data_written() -> Iterator[None]:
    """Inside, on this thread, `x.data = value` writes the values into `x`, where a trace sees it."""
    tracing = threading.get_ident()

    def write(x: Tensor, value: Tensor) -> None:
        if threading.get_ident() != tracing:
            _DATA.__set__(x, value)
            return
        _refuse_other_form("a tensor's data", x, value, quoted(user_line()))
        with torch.no_grad():
            _DATA.__get__(x).copy_(value)

    torch.Tensor.data = property(_DATA.__get__, write)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.data  # that of its base is there again
