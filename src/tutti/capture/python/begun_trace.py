"""The values that a trace leaves in the step's containers: its effects, and values that are lost."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any

from torch import Tensor

from tutti.capture.python.appended import Appended, is_longer
from tutti.capture.python.contents import contents
from tutti.capture.python.effects import Effect
from tutti.capture.python.findings import Number
from tutti.capture.python.held_values import (
    END,
    MISSING,
    MOVED,
    WHOLE,
    Table,
    TableEntry,
    plain_sequence,
)
from tutti.capture.python.kept_tables import (
    all_keys,
    are_in_order,
    has_order,
    in_order,
    is_list,
    is_mode,
)
from tutti.capture.python.left_values import LeftValue, tensors_in, varies
from tutti.capture.python.plain_values import equal, is_number
from tutti.capture.python.python_state import PythonState
from tutti.capture.python.reach import PLAIN
from tutti.capture.python.shared_tensors import Labels
from tutti.capture.python.symbols import SYMBOLS
from tutti.capture.state.new_slots import slot_ahead
from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.module_tables import FLAT_WEIGHTS
from tutti.torch_private.pytrees import TreeSpec, tree_flatten, tree_leaves
from tutti.user_lines import users_level


class BegunTrace:
    """A trace in progress: all values at its start, with the symbols. The arguments are those of `begin`."""

    def __init__(
        self,
        state: PythonState,
        symbols: Mapping[str, Any],
        given: Mapping[int, Tensor],
        mode: FakeTensorMode,
        left: Sequence[LeftValue] = (),
        tensors: Sequence[Tensor] = (),
    ) -> None:
        self.state = state
        begun = state.begin(symbols, given, mode, left, tensors)
        # By id of the tensor that it replaces.
        self.stand_ins, self._places, self._appended = begun
        self._before = [(t, t.values(), all_keys(t)) for t in state.tables]
        self._contents = contents(state.tables)
        self._old = {(id(t), key): x for t, values, _ in self._before for key, x in values.items()}
        self.leaves: list[Any] = []
        self.changed: set[str] = set()  # the names of numbers that the step has changed
        # The values with tensors, each with its effect.
        self.with_tensors: list[tuple[Effect, LeftValue]] = []
        # Values that calls cannot leave again.
        self.lost: list[LeftValue] = []
        # Values behind the former end of lists.
        self.added: list[LeftValue] = []
        # Lists in modules whose length has changed: name, length before and after.
        self.resized: list[tuple[str, int, int]] = []
        # Other such lists, whose items calls put there again, and other plain values that the step leaves.
        self.rewritten: list[tuple[str, int, int]] = []
        self.plain: list[LeftValue] = []

    def effects(self) -> list[Effect]:
        """The step's assignments so far; also sets `leaves` to their leaves.

        Raises:
            CaptureError: for a list of other than plain values that has grown or shrunk, or an array that
                has changed.
        """
        for kept in self._contents:
            kept.refuse_change()
        found: list[Effect] = []
        moved: list[Effect] = []
        changed: dict[tuple[int, Any], tuple[TableEntry, Any]] = {}
        for table, before, keys in self._before:
            if not table.writable:  # another tuple is a change of its holder
                continue
            now = table.values()
            if is_list(table) and len(before) != len(now):
                resized = table.prefix, len(before), len(now)
                if not self.state.is_of_model(table):
                    if is_longer(table, [*before.values()], [*now.values()]):
                        self.state.findings.append_to(table.prefix)
                    changed[id(table), WHOLE] = (
                        TableEntry(table, WHOLE),
                        self._items(table, resized),
                    )
                    self.rewritten.append(resized)
                    continue
                self.resized.append(resized)
            if isinstance(table.find(), dict):
                now = {key: MISSING for key in before if key not in now} | now
                moved += filter(None, [self._of_order(table, before)])
            now |= {key: table.find()[key] for key in all_keys(table) if key not in keys}
            for key, value in now.items():
                old = before.get(key, MISSING)
                if value is not old and not equal(value, old):
                    entry = TableEntry(table, self.state.key(key))
                    value = self.state.left(value)
                    if old is MISSING:
                        self._refuse_slot(entry, value)
                    if self._is_effect(entry, old, value):
                        changed[id(table), entry.key] = entry, value
        for number in self.state.numbers:
            if effect := self._of_number(number, changed):
                found.append(effect)
        every = *(x.added for _, x in self._appended), *(value for _, value in changed.values())
        leaves = [x for one in every for x in tree_leaves(one)]
        self._labels = Labels(self._places, self.stand_ins.values(), leaves)
        found += filter(None, starmap(self._of_appended, self._appended))
        for entry, value in changed.values():
            leaves, fixed, spec = _flattened(value)
            self.leaves += leaves
            condition = self._condition(entry, [*leaves, *fixed.values()])
            given = {"fixed": fixed, "labels": self._labels.of(leaves)}
            found.append(Effect((entry,), spec, len(leaves), condition, **given))
            if found[-1].condition is not None or any(isinstance(x, Tensor) for x in leaves):
                self.with_tensors.append((found[-1], LeftValue(entry, value)))
            elif all(isinstance(x, PLAIN) for x in leaves):
                self.plain.append(LeftValue(entry, found[-1].value(leaves)))
        return [*found, *moved]

    def _items(self, table: Table, resized: tuple[str, int, int]) -> list[Any]:
        """All items of a list that has grown or shrunk; raises `CaptureError` if one is no plain value."""
        items = [*plain_sequence(table.find())]
        if not all(_can_be_kept(x) and not isinstance(x, (Tensor, *SYMBOLS)) for x in items):
            raise self.state.findings.refused_length(*resized)
        return self.state.left(items)

    def _of_order(self, table: Table, before: Mapping[Any, Any]) -> Effect | None:
        """The effect of a dict whose keys have moved."""
        held = table.find()
        first = [key for key, value in before.items() if value is not MISSING]
        if not has_order(table) or are_in_order(held, in_order(held, first)):
            return None
        entries = tuple(TableEntry(table, self.state.key(key)) for key in held)
        return Effect(entries, tree_flatten(0)[1], 0, fixed={0: MOVED})

    def _refuse_slot(self, entry: TableEntry, value: Any) -> None:
        """Raise `SlotsAhead` for a slot that the step's own code puts into an optimizer's state."""
        one = self.state.states.get(id(entry.table.find()))
        if one is not None and any(True for _ in tensors_in(value)):
            key = next(iter(value)) if isinstance(value, dict) else entry.key
            raise slot_ahead(one, key)

    def _of_appended(self, table: Table, appended: Appended) -> Effect | None:
        """The effect of what the step appends to a list."""
        findings, added = self.state.findings, appended.added
        leaves, fixed, spec = _flattened(added)
        if appended.other_use is not None or not all(map(_can_be_kept, leaves)):
            findings.use(table.prefix, appended.other_use or appended.last_append)
        if not added:
            return None
        at = len(plain_sequence(table.find()))
        self.added += [LeftValue(TableEntry(table, at + i), x) for i, x in enumerate(added)]
        self.leaves += leaves
        given = {"fixed": fixed, "labels": self._labels.of(leaves)}
        return Effect((TableEntry(table, END),), spec, len(leaves), appends=True, **given)

    def _condition(self, entry: TableEntry, leaves: Sequence[Any]) -> tuple[Tensor, ...] | None:
        if not self.state.holds_value_of_module(entry):
            return None
        if not leaves or not all(isinstance(x, Tensor) for x in leaves):
            return None
        return tuple(tensors_in(self._old.get((id(entry.table), entry.key))))

    def _of_number(self, number: Number, changed: dict[tuple[int, Any], Any]) -> Effect | None:
        """One effect for all the entries of a number that the step has changed in the same way."""
        keys = [(id(entry.table), entry.key) for entry in number.entries]
        if len(keys) == 1 or not all(key in changed for key in keys):
            return None
        values = [changed[key][1] for key in keys]
        if values[0] is MISSING or len({_expression(value) for value in values}) != 1:
            return None
        for key in keys:
            del changed[key]
        self.leaves.append(values[0])
        return Effect(number.entries, tree_flatten(0)[1], 1)

    def _is_effect(self, entry: TableEntry, old: Any, value: Any) -> bool:
        of_module = self.state.holds_value_of_module(entry)
        if is_mode(entry) or (of_module and entry.key in FLAT_WEIGHTS):
            return False
        if is_number(old) and is_number(value):
            self.changed.add(entry.name)
        leaves = tree_flatten(value)[0]
        for table, appended in self._appended:
            if any(x is appended for x in leaves):
                line = appended.other_use or appended.last_append
                self.state.findings.use(table.prefix, line)
        known = all(map(_can_be_kept, leaves))
        if not known or (old is MISSING and is_list(entry.table)):
            if varies(value, old) or not any(True for _ in tensors_in(value)):
                self.lost.append(LeftValue(entry, value))
            return False
        if not of_module or any(True for _ in tensors_in(old)):
            return True
        return not any(isinstance(x, Tensor) for x in leaves) or varies(value, old)


def _expression(value: Any) -> Any:
    """The expression of a symbol, by which equal symbols compare."""
    return value.node.expr if isinstance(value, SYMBOLS) else value


_KEPT = (*PLAIN, *SYMBOLS, Tensor)


def _can_be_kept(leaf: Any) -> bool:
    """Whether each call can assign a leaf again: a result of the graph, a function or class of a module, or
    none.

    Another function may hold tensors of the trace, and would be a new one in each trace.
    """
    return _is_fixed(leaf) or (isinstance(leaf, _KEPT) and not isinstance(leaf, bytes))


def _is_fixed(leaf: Any) -> bool:
    return leaf is MISSING or _is_of_a_module(leaf)


def _is_of_a_module(x: Any) -> bool:
    """Whether a Python module has this function or class under its name."""
    if not isinstance(x, type | types.FunctionType):
        return False
    found: Any = sys.modules.get(x.__module__)
    for name in x.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is x


def _flattened(value: Any) -> tuple[list[Any], dict[int, Any], TreeSpec]:
    """The leaves of a value that are results of a graph, the others by position, and the structure of all."""
    leaves, spec = tree_flatten(value)
    fixed = {i: x for i, x in enumerate(leaves) if _is_fixed(x)}
    return [x for i, x in enumerate(leaves) if i not in fixed], fixed, spec


def say_lost(one: LeftValue) -> None:
    """Warn of an assignment that calls cannot repeat."""
    kind = type(one.value).__name__
    warnings.warn(
        f"{one.entry.name} stays as it is: the step puts a {kind} there, which happens in Python, where it "
        "runs once",
        stacklevel=users_level(),
    )
