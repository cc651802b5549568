"""The Python values that a step reads and changes: inputs and results of its graph, or constants.

A trace runs the step's Python once. A value that it reads is one of these:

    constant   part of the signature: another value traces again
    number     an input of the graph, once it is known to change: between calls, or in the step itself

A value that the step assigns (`self.i += 1`, `state["loss"] = loss`) is an effect: a result of the graph, or
a constant, assigned again after each call. The end of a trace restores all values.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.python.appended import Appended, put_in_place
from tutti.capture.python.contents import contents
from tutti.capture.python.findings import Findings, Number
from tutti.capture.python.held_values import (
    END,
    MISSING,
    WHOLE,
    Table,
    TableEntry,
    distinct,
    named,
)
from tutti.capture.python.identities import Identities
from tutti.capture.python.kept_tables import (
    KeptTable,
)
from tutti.capture.python.left_values import LeftValue
from tutti.capture.python.optimizer_tables import group_tables, holders, slot_tables
from tutti.capture.python.plain_values import is_plain_number, sign
from tutti.capture.python.reach import reach
from tutti.capture.python.shared_tensors import Sharing
from tutti.capture.state.first_step import is_pure_wrapper
from tutti.capture.state.free_numbers import is_finite
from tutti.capture.state.lift import is_scheduled
from tutti.errors import CaptureError
from tutti.graph.players.device import device_of
from tutti.torch_private.dispatch_modes import no_modes
from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.user_lines import quoted, user_line


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

    def expect_changes(self) -> None:
        """Before the first trace: expect changes of the numbers to which the step's code assigns."""
        if not self.findings.has_expected:
            self.findings.varying |= self.likely()
            self.findings.has_expected = True
            self.find_inputs()

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
    ) -> tuple[dict[int, Tensor], dict[int, TableEntry], list[tuple[Table, Appended]]]:
        """Put `symbols`, by name, in place of the inputs, and `state` in place of the tensors with these ids.

        Fakes replace all other tensors. Call it inside of `restored`. With the values `left` by another
        trace it is the next call's. The step may use `tensors`, of the state, as keys.

        Returns:
            The fakes by id of the tensor that they replace, the entry of each by its id, and the lists that
            note what the step appends.
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
        return stand_ins, places, put_in_place(self.tables, self.findings.appended)

    def is_of_model(self, table: Table) -> bool:
        """Whether the holder of a table is one of the model's modules, or in one."""
        return id(table.find()) in self._of_model

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
        return self.is_of_model(entry.table)


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


def _stand_in(x: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake of the same form, not a view and without autograd history."""
    with no_modes(), mode:  # the trace must not record it as an op of the step
        fake = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=device_of(x))
        if isinstance(x, nn.Parameter):
            return nn.Parameter(fake, x.requires_grad)
        return fake.requires_grad_(x.requires_grad and x.is_leaf)


def _tables_of(module: nn.Module) -> Iterator[Any]:
    yield vars(module)
    yield from (v for v in vars(module).values() if isinstance(v, dict | list))
