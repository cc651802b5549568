"""The state of an optimizer before its first step: the first values of its slots, its counts at their start.

`lift.create_slots` makes slots by a step, and undoes its changes of tensors. This file undoes its changes of
Python values: options that count, attributes, numbers in slots.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_COLLECTIONS = (dict, list)


class _FirstValues(dict):  # type: ignore[type-arg]
    """The slots of a parameter, which remember the first value of each, or its assumed default."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}
        self.update(*given, **named)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.first.setdefault(key, value)
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *given: Any, **named: Any) -> None:
        for key, value in dict(*given, **named).items():
            self[key] = value

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self and isinstance(default, int | float):
            self.first.setdefault(key, default)
        return super().get(key, default)


@contextlib.contextmanager
def first_values(optimizer: Optimizer, fresh: Sequence[Tensor]) -> Iterator[None]:
    """For a step of `optimizer` inside that makes slots: give those of `fresh` their first values."""
    attributes = {
        k: (v, v.copy() if isinstance(v, _COLLECTIONS) else None)
        for k, v in vars(optimizer).items()
        if k not in ("state", "param_groups")
    }
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    before = optimizer.state
    kept = {p: (slots, dict(slots)) for p, slots in before.items() if slots}
    optimizer.state = defaultdict(_FirstValues, before)
    try:
        yield
    finally:
        made = {p: optimizer.state[p] for p in fresh if p in optimizer.state}
        for slots, values in kept.values():
            slots.clear()
            slots.update(values)
        optimizer.state = before
        for p, slots in made.items():
            before[p] = _first(slots)
        for group, options in groups:
            group.clear()
            group.update(options)
        _put_back(optimizer, attributes)


def _first(slots: Any) -> dict[str, Any]:
    first = getattr(slots, "first", {})
    return {key: first.get(key, value) for key, value in slots.items()}


def _put_back(optimizer: Optimizer, attributes: dict[str, Any]) -> None:
    for key in [k for k in vars(optimizer) if k not in (*attributes, "state", "param_groups")]:
        del vars(optimizer)[key]
    for key, (value, copied) in attributes.items():
        vars(optimizer)[key] = value
        if isinstance(value, dict):
            value.clear()
            value.update(copied)
        elif isinstance(value, list):
            value[:] = copied
