"""The Python values that a step reads and changes: inputs and results of its graph, or constants.

A trace runs the step's Python once. A value that it reads is one of these:

    constant   part of the signature: another value traces again
    number     an input of the graph, once it is known to change: between calls, or in the step itself

A value that the step assigns (`self.i += 1`, `state["loss"] = loss`) is an effect: a result of the graph, or
a constant, assigned again after each call. The end of a trace restores all values.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.python.appended import Appended, TraceAgain, is_longer, put_in_place
from tutti.capture.python.contents import contents, refused_change
from tutti.capture.python.drawn_numbers import Draw, DrawnNumber
from tutti.capture.python.effects import Effect
from tutti.capture.python.held_values import (
    END,
    MISSING,
    MOVED,
    WHOLE,
    Table,
    TableEntry,
    distinct,
    named,
    plain_sequence,
)
from tutti.capture.python.identities import Identities
from tutti.capture.python.kept_tables import (
    KeptTable,
    all_keys,
    are_in_order,
    has_order,
    in_order,
    is_list,
    is_mode,
)
from tutti.capture.python.left_values import LeftValue, tensors_in, varies
from tutti.capture.python.optimizer_tables import group_tables, holders, slot_tables
from tutti.capture.python.plain_values import equal, is_number, is_plain_number, sign
from tutti.capture.python.reach import PLAIN, reach
from tutti.capture.python.read_places import Site
from tutti.capture.python.shared_tensors import Labels, Sharing
from tutti.capture.python.symbols import SYMBOLS
from tutti.capture.state.first_step import is_pure_wrapper
from tutti.capture.state.free_numbers import is_finite
from tutti.capture.state.lift import is_scheduled
from tutti.capture.state.new_slots import slot_ahead
from tutti.errors import CaptureError
from tutti.graph.players.device import device_of
from tutti.torch_private.dispatch_modes import no_modes
from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.module_tables import FLAT_WEIGHTS
from tutti.torch_private.pytrees import TreeSpec, tree_flatten, tree_leaves
from tutti.user_lines import quoted, user_line


@dataclass(frozen=True)
class Number:
    """A number that is an input of the graph, and its entry; several entries for one count.

    Those are an optimizer's step counts of each parameter: one count as long as they are equal.
    """

    name: str
    entries: tuple[TableEntry, ...]

    @property
    def value(self) -> int | float:
        """Its current value."""
        value = self.entries[0].get()
        return float(value) if isinstance(value, float) else int(value)

    def put(self, value: Any) -> None:
        for entry in self.entries:
            entry.put(value)


# The places in a name that begin an item or an attribute of the value with the name before it.
_INSIDE = re.compile(r"[.\[]")


@dataclass
class Findings:
    """Knowledge of the numbers of one step from its calls so far, by name of an entry.

    Args:
        varying: numbers that have changed, and so are inputs.
        fixed: numbers that must be constants, since a trace reads their values.
        unread: values that the step leaves in modules, and no call reads: no trace depends on them.
        appended: lists to which the step appends, and which it does not read: no trace depends on them.
        used: longer lists that the step reads, too.
        held: by id, tensors whose ids the step's Python has: no other object may get these ids.
        ids: of the model's tensors, each with the tensor's number.
        loops: the lines of reads in loops.
        kinds: the classes of containers in batches, of which the step may call methods; in order.
        gradients: the questions of traces about gradients that earlier calls have left.
        draws: the random numbers that a trace has drawn from the host's generators.
        constant_draws: those whose values Python reads.
    """

    varying: set[str] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    appended: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    held: dict[int, Tensor] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)
    loops: set[Site] = field(default_factory=set)
    kinds: dict[type, None] = field(default_factory=dict)
    gradients: set[tuple[str, str]] = field(default_factory=set)
    draws: tuple[Draw, ...] = ()
    constant_draws: set[Draw] = field(default_factory=set)
    _expected: bool = False

    def is_unread(self, name: str) -> bool:
        """Whether a value is one that no call reads, or in one."""
        unread, appended = self.unread, self.appended
        if not unread and not appended:
            return False
        outer = [name[: m.start()] for m in _INSIDE.finditer(name)]
        return name in unread or any(x in unread or x in appended for x in outer)

    def append_to(self, name: str) -> None:
        """Trace again with a list that notes what the step does with it; nothing for a list that it reads."""
        if name not in self.used and name not in self.appended:
            self.appended.add(name)
            raise TraceAgain

    def use(self, name: str) -> None:
        """Trace again without such a list: the step reads it, too."""
        self.used.add(name)
        self.appended.discard(name)
        raise TraceAgain

    def expect(self, state: PythonState) -> None:
        """Before the first trace: expect changes of the numbers to which the step's code assigns."""
        if not self._expected:
            self.varying |= state.likely()
            self._expected = True
            state.find_inputs()

    def expect_draws(self, found: Sequence[DrawnNumber]) -> bool:
        """Expect these draws in the next trace; whether they differ from those expected before."""
        before, self.draws = self.draws, tuple(one.draw for one in found)
        return self.draws != before

    def fix_draws(self, draws: Iterable[Draw]) -> bool:
        """Make constants of these inputs; whether there are any."""
        count = len(self.constant_draws)
        self.constant_draws |= {*draws}
        return len(self.constant_draws) > count

    def fix(self, inputs: Sequence[Number]) -> bool:
        """After a failed trace: make constants of the whole numbers among its inputs, or of all."""
        whole = {entry.name for n in inputs for entry in n.entries if isinstance(n.value, int)}
        self.fixed |= whole or {entry.name for n in inputs for entry in n.entries}
        return bool(inputs)


class PythonState:
    """The current Python values of one step.

    Args:
        step: the captured function.
        findings: shared by all walks for one step.
        arguments: those that the step gets as they are, by name.
    """

    def __init__(
        self,
        step: Any,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        findings: Findings,
        arguments: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        self.findings = findings
        # Later ones are shards, while keys may be ids of the first ones.
        findings.ids |= {id(x): i for i, x in enumerate((*model.parameters(), *model.buffers()))}
        reached = reach(step, model, optimizers, findings.ids, arguments, findings.kinds)
        self._own = {id(x) for x in (*model.parameters(), *model.buffers())}
        optimizers = [one for one in optimizers if not is_pure_wrapper(one)]
        self.states = {id(one.state): one for one in optimizers}
        self.states |= {id(x): one for one in optimizers for x in one.state.values()}
        self._stored, self.names, self.scopes = reached.stored, reached.names, reached.scopes
        self._of_model = {id(table) for m in model.modules() for table in _tables_of(m)}
        slots, groups = list(slot_tables(model, optimizers)), list(group_tables(optimizers))
        self.holders = holders(model, optimizers)
        self.tables = distinct([*reached.tables, *groups, *slots])
        self._slots = self.tables[len(reached.tables) + len(groups) :]
        self._groups = {id(table) for table in self.tables[len(reached.tables) :][: len(groups)]}
        self.find_inputs()
        self._by_prefix = {(t.kind, t.prefix): t for t in reversed(self.tables)}
        self._by_name: dict[str, TableEntry] | None = None

    def find_inputs(self) -> None:
        """Set `numbers`, those that are inputs, by the findings so far."""
        slots = {id(table) for table in self._slots}
        found: dict[Any, list[TableEntry]] = {}
        for name, entry, value in named(self.tables):
            if self._is_input(name, entry, value):
                one = id(entry.table) in slots
                key = (name.partition(".")[0], entry.key, value) if one else name
                found.setdefault(key, []).append(entry)
        self.numbers = [Number(entries[0].name, tuple(entries)) for entries in found.values()]

    def _is_input(self, name: str, entry: TableEntry, value: Any) -> bool:
        if not is_plain_number(value) or name in self.findings.fixed or not entry.table.writable:
            return False
        if self.findings.is_unread(name) or not is_finite(value):
            return False
        return name in self.findings.varying and not self.is_scheduled(entry, value)

    def is_scheduled(self, entry: TableEntry, value: Any) -> bool:
        """Whether a value is an input of every graph: a group's option that schedules change."""
        return id(entry.table) in self._groups and is_scheduled(entry.key, value)

    def likely(self) -> set[str]:
        """The names of numbers to which the step's code assigns."""
        return {
            name
            for name, entry, value in named(self.tables)
            if is_plain_number(value)
            and entry.table.writable
            and str(entry.table.prefix if entry.key is None else entry.key) in self._stored
        }

    def constants(self) -> tuple[Any, ...]:
        """The hashable key of a trace: each value with its type, inputs by name and type alone."""
        inputs = {(id(entry.table), entry.key): n.name for n in self.numbers for entry in n.entries}
        found: list[Any] = []
        is_unread, sharing, own = self.findings.is_unread, Sharing(), self.own_tensors
        for name, entry, value in named(self.tables):
            if is_unread(name):
                continue
            given = inputs.get((id(entry.table), entry.key))
            free = given is not None or self.is_scheduled(entry, value)
            seen = type(value) if given is not None else None if free else sign(value)
            if name in self.findings.appended:
                seen = type(value)
            elif self.findings.unread and isinstance(value, dict):
                seen = (type(value), sum(not is_unread(f"{name}[{key!r}]") for key in value))
            if not free and isinstance(value, Tensor) and id(value) not in own:
                seen = seen, *sharing.of(name, value)
            found.append((name, given, seen))
        return tuple(found)

    @property
    def own_tensors(self) -> set[int]:
        """The ids of the model's parameters and buffers, and of the slots."""
        return {*self._own, *(id(x) for table in self._slots for x in table.values().values())}

    def tensors(self) -> dict[int, TableEntry]:
        """By id, the tensors in the tables, without the state of the model and the optimizers."""
        found: dict[int, TableEntry] = {}
        for _, entry, value in named(self.tables):
            if isinstance(value, Tensor):
                found.setdefault(id(value), entry)
        return found

    @contextlib.contextmanager
    def restored(self, but: Collection[int] = ()) -> Iterator[None]:
        """Restore everything at the end, and remove what a trace has added.

        Without the values in holders with the ids `but`.
        """
        tables = [table for table in self.tables if id(table.find()) not in but]
        before = [KeptTable(table) for table in tables]
        inside = contents(tables)
        try:
            with contextlib.ExitStack() as self._inside:
                yield
        finally:
            for kept in [*inside, *before]:
                kept.put_back()

    def begin(
        self,
        symbols: Mapping[str, Any],
        state: Mapping[int, Tensor],
        mode: FakeTensorMode,
        left: Sequence[LeftValue] = (),
        tensors: Sequence[Tensor] = (),
    ) -> BegunTrace:
        """Put `symbols`, by name, in place of the inputs, and `state` in place of the tensors with these ids.

        Fakes replace all other tensors. Call it inside of `restored`. With the values `left` by another
        trace it is the next call's. The step may use `tensors`, of the state, as keys.
        """
        for number in self.numbers:
            number.put(symbols[number.name])
        for one in left:
            one.put()
        stand_ins: dict[int, Tensor] = {}
        places: dict[int, TableEntry] = {}
        replaced = [*tensors]
        for name, entry, value in list(named(self.tables)):
            # Of a tuple's tensors `inside_of` makes another tuple.
            writable = entry.table.writable
            if writable and _is_iterator(value):
                entry.put(Untouched(name, value))
            if not isinstance(value, Tensor):
                continue
            if id(value) in state:
                new = state[id(value)]
            elif type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
                if id(value) not in stand_ins:
                    stand_ins[id(value)] = _stand_in(value, mode)
                    replaced.append(value)
                    places[id(stand_ins[id(value)])] = entry
                new = stand_ins[id(value)]
            else:
                continue
            if writable:
                entry.put(new)
        self._identities = Identities({**stand_ins, **state}, replaced)
        for one in left:
            if (value := self._identities.left_before(one.value)) is not one.value:
                one.entry.put(value)
        self._inside.enter_context(self._identities.inside_of(self.tables))
        appended = put_in_place(self.tables, self.findings.appended)
        return BegunTrace(self, stand_ins, places, appended)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Keep those of `tensors` whose ids the step's containers have."""
        asked = self._identities.asked
        self.findings.held |= {id(x): x for x in tensors if id(x) in asked}

    def key(self, key: Any) -> Any:
        """The key of a table outside of the trace, for one inside."""
        return self._identities.key(key)

    def left(self, value: Any) -> Any:
        """A value that the step leaves, for one inside of the trace."""
        return self._identities.left(value)

    def entry_like(self, entry: TableEntry) -> TableEntry:
        """The entry of the same name in this walk, for one of an earlier walk."""
        if self._by_name is None:
            every = [(name, one) for name, one, value in named(self.tables) if value is not MISSING]
            self._by_name = dict(reversed(every))
        if entry.key is not END and entry.key is not WHOLE and entry.name in self._by_name:
            return self._by_name[entry.name]
        table = self._by_prefix.get((entry.table.kind, entry.table.prefix))
        return entry if table is None else TableEntry(table, entry.key)

    def holds_value_of_module(self, entry: TableEntry) -> bool:
        """Whether an entry is in one of the model's modules, which keep values for inspection."""
        return id(entry.table.find()) in self._of_model


def _is_iterator(value: Any) -> bool:
    """Whether a value is one of Python's iterators or a generator; not a file, which a step may write."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


class Untouched:
    """Replaces an iterator during a trace, and refuses `next`: it would run only then."""

    def __init__(self, name: str, iterator: Any) -> None:
        self._name, self._kind = name, type(iterator).__name__

    def __iter__(self) -> Untouched:
        return self

    def send(self, _: Any) -> Any:
        return next(self)

    def __next__(self) -> Any:
        raise CaptureError(
            f"the step takes the next of {self._name}, a {self._kind}",
            at=quoted(user_line()),
            why="the step's Python runs once, while it is captured: each call would have this one",
            fix="take it before the step, and hand it over as an argument; or count in a number",
        )


class BegunTrace:
    """A trace in progress: all values at its start, with the symbols."""

    def __init__(
        self,
        state: PythonState,
        stand_ins: Mapping[int, Tensor],
        places: Mapping[int, TableEntry],
        appended: Sequence[tuple[Table, Appended]] = (),
    ) -> None:
        self.state, self._appended = state, appended
        # By id of the tensor that it replaces.
        self.stand_ins, self._places = stand_ins, places
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
                if id(table.find()) not in self.state._of_model:
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
            raise refused_change(*resized)
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
        if appended.has_other_uses or not all(map(_can_be_kept, leaves)):
            findings.use(table.prefix)
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
                self.state.findings.use(table.prefix)
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


def _stand_in(x: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake of the same form, not a view and without autograd history."""
    with no_modes(), mode:  # the trace must not record it as an op of the step
        fake = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=device_of(x))
        if isinstance(x, nn.Parameter):
            return nn.Parameter(fake, x.requires_grad)
        return fake.requires_grad_(x.requires_grad and x.is_leaf)


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
        stacklevel=2,
    )


def _tables_of(module: nn.Module) -> Iterator[Any]:
    yield vars(module)
    yield from (v for v in vars(module).values() if isinstance(v, dict | list))
