"""What a step leaves in Python, and each call puts there again: results of the graph, or constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tutti.capture.python.held_values import MISSING, MOVED, TableEntry, plain_sequence
from tutti.capture.python.shared_tensors import Label, share
from tutti.torch_private.pytrees import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Effect:
    """The value that a step assigns to `entries`: `num_leaves` leaves of `spec`, among the last results of
    its graph.

    With a `condition` a tensor of several elements counts only if this step reads one of these tensors, or
    the next one depends on the value: modules keep values for inspection. `inspected`: no call reads it.
    `appends`: several values, which come behind the items of a list. `fixed` are functions and classes among
    the leaves of `spec`, by position; they are no results of the graph, nor is `MISSING` in place of a value
    that the step removes. `MOVED` stands for all values of a dict whose order the step changes. `labels` tell
    which leaves of a step's effects are one tensor.
    """

    entries: tuple[TableEntry, ...]
    spec: TreeSpec
    num_leaves: int
    condition: tuple[Tensor, ...] | None = field(default=None, repr=False)
    inspected: bool = False
    appends: bool = False
    fixed: Mapping[int, Any] = field(default_factory=dict)
    labels: tuple[Label | None, ...] = ()

    @property
    def name(self) -> str:
        """The name of its first value, or of the order of several ones."""
        return f"order of {self.entries[0].table.prefix}" if self.moves else self.entries[0].name

    @property
    def shared(self) -> list[str | None]:
        """Its labels, the same for an equal effect of another trace."""
        return [None if one is None else one.as_text() for one in self.labels]

    @property
    def removes(self) -> bool:
        """Whether it removes a value."""
        return self.fixed.get(0) is MISSING

    @property
    def moves(self) -> bool:
        """Whether it changes the order of a dict."""
        return self.fixed.get(0) is MOVED

    @property
    def may_be_read(self) -> bool:
        """Whether later calls of the step may read the value."""
        return not self.inspected and not self.appends

    def now(self) -> Any:
        """The value in its place."""
        if not self.appends:
            return self.entries[0].get()
        items = list(plain_sequence(self.entries[0].table.find()))
        return items[len(items) - self.spec.num_children :]

    def results_now(self) -> list[Any]:
        """The leaves of the value in its place that are results of the graph."""
        if not self.num_leaves:
            return []
        return [x for i, x in enumerate(tree_flatten(self.now())[0]) if i not in self.fixed]

    def value(self, leaves: Sequence[Any]) -> Any:
        """The value to assign."""
        every = list(leaves)
        for at, one in self.fixed.items():  # in the order of their positions
            every.insert(at, one)
        return tree_unflatten(every, self.spec)


def found_by(effects: Sequence[Effect]) -> set[TableEntry]:
    """The entries whose tensors the step has found there and puts elsewhere."""
    every = [one for effect in effects for one in effect.labels if one is not None]
    places = [x for one in every for x in (one.tensor, one.memory)]
    return {x for x in places if isinstance(x, TableEntry)}


def values_of(
    effects: Sequence[Effect], results: Sequence[Any], found: Mapping[TableEntry, Any] | None = None
) -> list[Any]:
    """The value of each effect; `results` are the leaves of all, in order.

    `found` are the values that the call has found in the entries of `found_by`.
    """
    values, at = [], 0
    made: dict[Any, Any] = dict(found or {})
    for effect in effects:
        leaves = results[at : at + effect.num_leaves]
        values.append(effect.value(share(effect.labels, leaves, made) if effect.labels else leaves))
        at += effect.num_leaves
    return values
