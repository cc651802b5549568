"""What a step keeps in Python: a capture runs that code once, so a number that each step changes is refused.

Looked at are numbers that the step function reaches by name, and how long collections are: a counter of steps
would stay where the capture left it. One that is set once (a length that a cache has grown to) is no counter:
where a trace has changed a number, a second one tells. Numbers of modules are part of a step's signature
instead: where one has changed, the step is captured anew.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch._subclasses import FakeTensor

from tutti.errors import CaptureError

_NUMBERS = (int, float, complex)
_COLLECTIONS = (list, dict, set)


class Numbers:
    """Numbers that a step function reaches by name, and the lengths of collections."""

    def __init__(self, train_step: Callable[..., Any]) -> None:
        self._reached = _reached_by(train_step)

    def now(self) -> dict[str, Any]:
        """By name: `calls`, `len(losses)`."""
        found: dict[str, Any] = {}
        for name, value in self._reached().items():
            if type(value) in _NUMBERS:
                found[name] = value
            elif isinstance(value, _COLLECTIONS):
                found[f"len({name})"] = len(value)
        return found


@contextlib.contextmanager
def no_values_left(model: nn.Module) -> Iterator[None]:
    """Fake tensors that a trace has left in modules (`self.last = x`) go; what was there comes back."""
    held = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, before in held:
            now = vars(module)
            for key in [k for k, value in now.items() if isinstance(value, FakeTensor)]:
                del now[key]
                now.update({key: before[key]} if key in before else {})


def refuse_counters_in_python(
    before: dict[str, Any], once: dict[str, Any], trace_again: Callable[[], dict[str, Any]]
) -> None:
    """Raise if a trace has changed numbers (`before`, `once`), and another one would again."""
    changed = [name for name, value in once.items() if before.get(name, value) != value]
    if not changed:
        return
    twice = trace_again()
    counters = [name for name in changed if twice[name] != once[name]]
    if counters:
        name = counters[0]
        raise CaptureError(
            f"the step changes {name} in Python ({before[name]}, then {once[name]}, then {twice[name]})",
            why="the step is captured once: it would stay as it was then",
            fix="count outside of the step; what the step computes with may be a buffer of the model, or a "
            "float among the step's arguments",
        )


def _reached_by(function: Callable[..., Any]) -> Callable[[], dict[str, Any]]:
    """What a function reaches by the names of its closure and of its module."""

    def reached() -> dict[str, Any]:
        try:
            known = inspect.getclosurevars(function)
        except (TypeError, ValueError):  # no Python function, or a name without a value yet
            return {}
        return {**known.globals, **known.nonlocals}

    return reached
