"""Reads the input numbers of a call's graph from their entries without a walk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tutti.calls.tables import are_same
from tutti.capture.state.free_numbers import is_free_number
from tutti.capture.state.lift import SCHEDULED, hypers_of, numbers, optimizers_of


class Numbers:
    """The scheduled hyper-parameters of `optimizer` and a batch's numbers, call by call."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._optimizers = optimizer, optimizers_of(optimizer)
        # The last groups, the kinds of their values, and the entry of each number.
        self._groups: list[dict[str, Any]] = []
        self._kinds: list[Any] = []
        self._entries: list[tuple[str, dict[str, Any], str, int | None]] = []

    def of(self, leaves: Sequence[Any], python: Mapping[str, float]) -> dict[str, float]:
        """As `capture.state.lift.numbers`; `python` are the numbers of the step's own Python."""
        groups = [group for one in self._optimizers for group in one.param_groups]
        kinds = [_kind(group.get(key)) for group in groups for key in SCHEDULED]
        if kinds != self._kinds or not are_same(groups, self._groups):
            self._groups, self._kinds = groups, kinds
            hypers = hypers_of(self._optimizer)
            self._entries = [
                (h.name, h.optimizer.param_groups[h.group], h.key, h.item) for h in hypers
            ]
        values = {
            name: group[key] if item is None else group[key][item]
            for name, group, key, item in self._entries
        }
        of_values = {*map(type, values.values())}
        if not of_values <= {float, int}:  # tensors
            return numbers(self._optimizer, leaves, python)
        if int in of_values:
            values = {name: float(x) for name, x in values.items()}
        if python:
            values |= python
        free = [+x for x in leaves if is_free_number(x)]
        return values | {f"number.{k}": x for k, x in enumerate(free)} if free else values


def _kind(value: Any) -> Any:
    return (type(value), len(value)) if isinstance(value, list | tuple) else type(value)
