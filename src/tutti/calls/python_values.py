"""Checks the Python values of a step at each call: by few reads, and by a walk after a change.

strict   the same object as at the last call; any other causes a new walk
loose    a tensor of the same form, which replaces another at each call
inputs   numbers: their values are inputs of the graph
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import call, is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.calls.host_draws import HostDraws
from tutti.calls.tables import are_same
from tutti.capture.batch import argument_name
from tutti.capture.captured import Captured
from tutti.capture.handed import (
    Batch,
    Place,
    arguments_in,
    handed_over,
    is_batch,
    objects_in,
    refused_again,
)
from tutti.capture.python.contents import contents_of, has_contents
from tutti.capture.python.effects import Effect, found_by, values_of
from tutti.capture.python.findings import Findings, Number
from tutti.capture.python.held_values import GONE, MISSING, TableEntry, named
from tutti.capture.python.outside import may_be_input
from tutti.capture.python.plain_values import is_plain_number
from tutti.capture.python.python_state import PythonState
from tutti.capture.python.reach import argument_entry
from tutti.capture.python.shared_tensors import sharing_of
from tutti.capture.state.free_numbers import is_finite

Read = Callable[[], Sequence[Any]]


class PythonValues:
    """The Python values of one step.

    `findings` describes its numbers, for its captures.
    """

    def __init__(self, step: Any, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._given = (step, model, optimizers)
        self._num_args = 1 + bool(optimizers)
        self.findings = Findings()
        self.draws = HostDraws(lambda entry: self.state.entry_like(entry))
        self.arguments: dict[str, Any] = {}  # that the step gets as they are, of this call
        self.places: frozenset[Place] = frozenset()  # of those without code
        self._changed_last: tuple[tuple[Place, Any], ...] = ()
        self._names_of_arguments: dict[Place, str] = {}
        # Whether the last call took all arguments apart, and those that are no tensors or containers of some.
        self._takes_all_apart, self._others = False, list[Any]()
        self._integers: dict[Place, int] = {}  # among the arguments of the last call
        self.changed: set[str] = set()  # the names of entries that the step changes
        self.removed: set[str] = set()  # those of entries that it removes
        self.other = ""  # the name of a constant that the last change has changed
        self._state: PythonState | None = None
        self._moved = (
            False  # whether the last call has changed the order of a dict, which no read shows
        )
        self._constants: tuple[Any, ...] = ()
        self._loose_names: set[str] = set()
        self._met: dict[Any, int] = {}
        self._number = 0
        self._numbers: Mapping[str, Any] = {}
        self._resolved: dict[int, tuple[Effect, tuple[TableEntry, ...]]] = {}

    def now(self) -> tuple[int, dict[str, float]]:
        """A number for the constants of a trace, and the inputs by name."""
        for _ in range(3):
            found = self._values() if self._state is not None else None
            if found is not None:
                return self._number, found
            self.walk()
        raise AssertionError("values change while they are read")

    def walk(self) -> None:
        """Walk over all values. Numbers that have changed since the last walk become inputs."""
        before, state = self._state, self._walked()
        if before is not None:
            changed = self._changed(before, state) - self.findings.fixed
            if changed - self.findings.varying:
                self.findings.varying |= changed
                state = self._walked()
        constants = state.constants()
        if self._state is not None and constants != self._constants:
            self.other = _first_other(self._constants, constants)
        self._state, self._constants = state, constants
        self._number = self._met.setdefault(constants, len(self._met))
        self._resolved, self._moved = {}, False
        self._plan(state)

    def _walked(self) -> PythonState:
        return PythonState(*self._given, self.findings, self.arguments)

    def handed(self, batch: Batch) -> Batch:
        """`batch` with the arguments that the step gets as they are, which become values of the step.

        Raises `CaptureError` for a container that the last call has changed on one device only.
        """
        others = [x for x in batch if not is_batch(x)]
        if self._takes_all_apart and not self.places and are_same(others, self._others):
            return batch
        now = dict(arguments_in(batch))
        last, self._changed_last = self._changed_last, ()
        for place, x in last:
            if now.get(place) is x:
                raise refused_again(self._name(place))
        self._note_integers(now)
        places = self.places | objects_in(batch)
        self._others, self._takes_all_apart = others, not places
        return handed_over(batch, places, self.arguments, self._name)

    def _note_integers(self, now: Mapping[Place, Any]) -> None:
        """Make a value of the step of an integer that differs from that of the last call: a count of batches
        or of steps."""
        integers = {place: x for place, x in now.items() if type(x) is int}
        for place, x in integers.items():
            if place not in self.places and self._integers.get(place, x) != x:
                self.places |= {place}
                self.findings.varying.add(argument_entry(self._name(place)))
        self._integers |= integers

    def _name(self, place: Place) -> str:
        if place not in self._names_of_arguments:
            self._names_of_arguments[place] = argument_name(self._given[0], self._num_args, place)
        return self._names_of_arguments[place]

    def write_into(self, batch: Batch, captured: Captured) -> None:
        """Write plain values into containers with tensors, as the step does; note the lost changes."""
        changes = captured.changes
        changes.write(batch)
        given = arguments_in(batch)
        self._changed_last = tuple((k, x) for k, x in given if changes.loses(k))
        self._takes_all_apart = self._takes_all_apart and not self._changed_last

    @property
    def state(self) -> PythonState:
        """The result of the last walk."""
        assert self._state is not None
        return self._state

    def note_changed(self, captured: Captured) -> None:
        """Record the changes of a trace, for checkpoints."""
        read = (effect for effect in captured.effects if effect.may_be_read)
        entries = [entry for effect in read if not effect.moves for entry in effect.entries]
        entries += [e for name, e in captured.outside.items() if name in captured.updated]
        self.changed |= {entry.name for entry in entries if not entry.table.of_caller}
        removed = (effect.entries[0] for effect in captured.effects if effect.removes)
        self.removed |= {entry.name for entry in removed if not entry.table.of_caller}

    def apply(self, captured: Captured, results: Sequence[Any]) -> None:
        """Store a step's results in their places, and mark those of values that calls do not keep."""
        effects = captured.effects
        found = {entry: self.state.entry_like(entry).get() for entry in found_by(effects)}
        for effect, value in zip(effects, values_of(effects, results, found), strict=True):
            known = self._resolved.get(id(effect))
            if known is None:
                entries = tuple(self.state.entry_like(entry) for entry in effect.entries)
                known = self._resolved[id(effect)] = effect, entries
            for entry in known[1]:
                entry.put(value)
            self._moved |= effect.moves
        for one in captured.not_kept:
            entry = self.state.entry_like(one.entry)
            if entry.get() is not one.placeholder:
                entry.put(one.placeholder)

    def _changed(self, before: PythonState, now: PythonState) -> set[str]:
        old = self._numbers
        self._numbers = _plain_numbers(now)
        return {n for n, x in self._numbers.items() if n in old and not _is_same(old[n], x)}

    def _plan(self, state: PythonState) -> None:
        """The reads of each call, and their last values."""
        self._numbers = _plain_numbers(state)
        inputs = {(id(entry.table), entry.key) for n in state.numbers for entry in n.entries}
        strict: list[Read] = []
        held: list[Any] = []
        self._entries: list[TableEntry] = []
        self._loose: list[tuple[TableEntry, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        for table in state.tables:
            keys = []
            for key, value in table.values().items():
                entry = TableEntry(table, key)
                if value is MISSING or (id(table), key) in inputs:
                    continue
                if state.findings.is_unread(entry.name):
                    continue
                if state.is_scheduled(entry, value):
                    continue
                if isinstance(value, Tensor) and self._is_loose(state, entry):
                    self._loose.append((entry, form_of(value)))
                    continue
                if has_contents(value):
                    self._arrays.append((value, contents_of(value)))
                if not table.writable:  # a tuple: the same one has the same values
                    continue
                keys.append(key)
                held.append(value)
                self._entries.append(entry)
            if keys:
                strict.append(table.reader(keys))
                if table.width(keys) == 2:
                    held.append(held[-1])
                    self._entries.append(self._entries[-1])
        self._strict, self._held = strict, held
        own = state.own_tensors
        self._outside = [x for x in held if isinstance(x, Tensor) and id(x) not in own]
        self._replaced = [entry for entry, _ in self._loose if id(entry.get()) not in own]
        self._sharing = self._sharing_now()
        self._holders = state.holders
        self._held_by = [*chain.from_iterable(map(call, self._holders))]
        appended = state.findings.appended
        tables = (t for t in state.tables if t.writable and t.prefix not in appended)
        sized = (table.sized for table in tables)
        self._sized = [x for x in sized if x is not None]
        self._size = sum(map(len, self._sized))
        self._plan_inputs(state.numbers)

    def _plan_inputs(self, numbers: Sequence[Number]) -> None:
        entries = [entry for n in numbers for entry in n.entries]
        self._names = [n.name for n in numbers]
        self._inputs = [p.table.reader([p.key]) for p in entries]
        firsts, at = [], 0
        for n in numbers:
            firsts += [at] * len(n.entries)
            at += len(n.entries)
        self._firsts = firsts
        self._at = sorted(set(firsts))
        self._types = [type(p.get()) for p in entries]
        self._several = len(entries) != len(numbers)

    def _is_loose(self, state: PythonState, entry: TableEntry) -> bool:
        return entry.name in self._loose_names or state.holds_value_of_module(entry)

    def _values(self) -> dict[str, float] | None:
        """The inputs; None if another value has changed."""
        if self._moved:
            return None
        try:
            if not are_same([*chain.from_iterable(map(call, self._holders))], self._held_by):
                return None
            now = chain.from_iterable(map(call, self._strict))
            if not all(map(is_, now, self._held)):  # each reader gives as many values as before
                self._note_other_tensors([*chain.from_iterable(map(call, self._strict))])
                return None
            if sum(map(len, self._sized)) != self._size or not self._are_loose_ones_there():
                return None
            values = [read()[0] for read in self._inputs]
        except GONE:
            return None
        if any(contents_of(array) != held for array, held in self._arrays):
            return None
        if [*map(type, values)] != self._types or not all(map(is_finite, values)):
            return None
        if self._several and [values[i] for i in self._firsts] != values:
            return None
        return dict(zip(self._names, [values[i] for i in self._at], strict=True))

    def _note_other_tensors(self, now: list[Any]) -> None:
        """Make a tensor that has replaced another loose."""
        if len(now) == len(self._held):
            for value, held, entry in zip(now, self._held, self._entries, strict=True):
                if value is not held and may_be_input(held) and may_be_input(value):
                    self._loose_names.add(entry.name)

    def _are_loose_ones_there(self) -> bool:
        there = all(form_of(entry.get()) == form for entry, form in self._loose)
        return there and self._sharing_now() == self._sharing

    def _sharing_now(self) -> list[Any]:
        """Which tensors outside of the state are one, or share memory, if some of them are loose."""
        loose = [entry.get() for entry in self._replaced]
        return sharing_of([*self._outside, *loose]) if loose else []


def _first_other(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """The name of the first value that is new, gone, or has changed."""
    old, new = {one[0]: one[1:] for one in before}, {one[0]: one[1:] for one in now}
    names = [*new, *(name for name in old if name not in new)]
    return next((n for n in names if old.get(n) != new.get(n)), "")


def _is_same(before: Any, now: Any) -> bool:
    """Whether a number is unchanged; one NaN is as good as another."""
    return before == now or (before != before and now != now)


def form_of(value: Any) -> Any:
    """The properties of a tensor that a trace depends on."""
    if not isinstance(value, Tensor):
        return None
    return (value.shape, value.dtype, value.requires_grad)


def _plain_numbers(state: PythonState) -> Mapping[str, Any]:
    return {n: x for n, _, x in named(state.tables) if is_plain_number(x)}
