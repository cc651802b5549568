"""The numbers of a call that are inputs of its graph, read from where they stand without a walk."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from tutti.capture.lift import hypers_of, numbers, optimizers_of


class Numbers:
    """The scheduled hyper-parameters of `optimizer` and a batch's floats, call by call."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._optimizers = optimizer, optimizers_of(optimizer)
        # The groups met last, how many entries each had, and what was read of them: name, group, key, item.
        self._groups: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._places: list[tuple[str, dict[str, Any], str, int | None]] = []

    def of(self, leaves: Sequence[Any]) -> dict[str, float]:
        """As `capture.lift.numbers`."""
        groups = [group for one in self._optimizers for group in one.param_groups]
        same = len(groups) == len(self._groups) and all(map(is_, groups, self._groups))
        if not same or [*map(len, groups)] != self._sizes:
            self._groups, self._sizes = groups, [*map(len, groups)]
            found = hypers_of(self._optimizer)
            self._places = [
                (h.name, h.optimizer.param_groups[h.group], h.key, h.item) for h in found
            ]
        try:
            values = {
                name: group[key] if item is None else group[key][item]
                for name, group, key, item in self._places
            }
        except (KeyError, IndexError, TypeError):
            return numbers(self._optimizer, leaves)
        if any(
            type(x) is not float for x in values.values()
        ):  # an int, a tensor, another kind than before
            return numbers(self._optimizer, leaves)
        floats = [x for x in leaves if isinstance(x, float)]
        return values | {f"number.{k}": x for k, x in enumerate(floats)} if floats else values
