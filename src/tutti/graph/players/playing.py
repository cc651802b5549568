"""Plays the row of a loop's body on an engine: `play(Row(body), values, engine)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.graph.ops.loop import RECEIVE, SEND, Body, Do, LoopPart

# The scopes of values common to all micro-batches, and of sums over them.
_COMMON, _TOTAL = "common", "total"


class BodyEngine(Protocol):
    """Runs the parts of a body: for one rank, or for several virtual ones at once."""

    def call(
        self, part: LoopPart, inputs: list[Any], micro: int, *, adding: bool
    ) -> tuple[list[Any], list[Any]]:
        """The part's outputs and its terms of sums, from its graph `adding` if `adding`.

        It may empty `inputs`.
        """
        ...

    def add(self, total: Any, value: Any, op: str) -> Any:
        """`total` reduced with one more value; it may overwrite `total`."""
        ...

    def join(self, values: list[Any], dim: int, outer: int) -> Any:
        """The values of all micro-batches as one."""
        ...

    def send(self, do: Do, values: list[Any]) -> None:
        """Send the message of `do`."""
        ...

    def receive(self, do: Do, likes: list[Tensor]) -> list[Any]:
        """The tensors that `do` waits for, like `likes`."""
        ...


class Row:
    """The row of a body, with each value in a slot of one list: it looks up names once, not at every step.

    A later value reuses the slot of a dead one. A value without a reader stays until the row ends.
    """

    def __init__(self, body: Body) -> None:
        self.body, self.num_values = body, 0
        self._free: list[int] = []
        self._slots: dict[tuple[Any, str], int] = {}
        self._sums = {s.name: s for s in body.sums}
        self.given = [self._slot(_COMMON, name) for name in body.given]
        self.entries: list[_Entry] = []
        for do, part, dying in zip(body.row, body.played, body.last_reads, strict=True):
            if do.way == RECEIVE:
                self.entries.append(self._received(body, do))
            elif do.way == SEND:
                self.entries.append(self._sent(body, do, dying))
            elif part is not None and not part.is_empty:
                self.entries.append(self._part(body, part, do, dying))
        self.results = [self._slot(_TOTAL, name) for name in body.results]
        found = (self._sums.get(name) for name in body.results)
        self.joins = [s if s is not None and s.op == "join" else None for s in found]

    def _slot(self, scope: Any, name: str) -> int:
        """The slot of a value, now or later."""
        if (scope, name) not in self._slots:
            if not self._free:
                self._free.append(self.num_values)
                self.num_values += 1
            self._slots[scope, name] = self._free.pop()
        return self._slots[scope, name]

    def _left(self, scope: Any, name: str) -> int:
        """Free the slot of a dead value, and return it."""
        self._free.append(self._slots.pop((scope, name)))
        return self._free[-1]

    def _received(self, body: Body, do: Do) -> _Received:
        names = body.messages.get((do.other, do.kind, do.stage), ())
        slots = [self._slot((do.stage, do.micro), n) for n in names]
        return _Received(do, [body.vals[n] for n in names], slots)

    def _sent(self, body: Body, do: Do, dying: frozenset[str]) -> _Sent:
        names = body.messages.get((do.stage, do.kind, do.other), ())
        slots = [self._slots[body.scope_of(do, n), n] for n in names]
        gone = [self._left(body.scope_of(do, n), n) for n in names if n in dying]
        return _Sent(do, slots, gone)

    def _part(self, body: Body, part: LoopPart, do: Do, dying: frozenset[str]) -> _Called:
        near = body.near[do.stage, do.kind]
        handed = {n for _, names in near for n in names}
        inputs, gone, taken = [], [], dying - handed
        for name in part.inputs:
            scope: Any = _COMMON
            if (scope, name) not in self._slots:
                scope = body.scope_of(do, name)
            inputs.append(self._slots[scope, name])
            if scope is not _COMMON and name in taken:
                gone.append(self._left(scope, name))
        added = part.summed[: part.num_added]
        adding = part.adding is not None and all((_TOTAL, n) in self._slots for n in added)
        if adding:
            inputs += [self._slots[_TOTAL, n] for n in added]
        totals = [self._left(_TOTAL, n) for n in part.totals]
        inputs, gone = inputs + totals, gone + totals
        outputs = [self._slot(body.scope_of(do, n), n) for n in part.outputs]
        outputs += [self._slot(_TOTAL, n) for n in part.reduced]
        sums = []
        for name in part.summed[part.num_added if adding else 0 :]:
            first = (_TOTAL, name) not in self._slots
            sums.append((self._slot(_TOTAL, name), self._sums[name].op, first))
        copies = [
            (self._slots[body.scope_of(do, n), n], self._slot((other, do.micro), n))
            for other, names in near
            for n in names
        ]
        after = [self._left(body.scope_of(do, n), n) for n in handed & dying]
        return _Called(part, do.micro, adding, inputs, gone, outputs, sums, copies, after)


class _Entry(Protocol):
    def play(self, values: list[Any], engine: BodyEngine) -> None:
        """Play the row. Afterwards no local name may keep a value alive."""
        ...


@dataclass(frozen=True, slots=True)
class _Received:
    do: Do
    likes: list[Tensor]
    slots: list[int]

    def play(self, values: list[Any], engine: BodyEngine) -> None:
        for k, x in zip(self.slots, engine.receive(self.do, self.likes), strict=True):
            values[k] = x


@dataclass(frozen=True, slots=True)
class _Sent:
    do: Do
    slots: list[int]
    gone: list[int]

    def play(self, values: list[Any], engine: BodyEngine) -> None:
        engine.send(self.do, [values[k] for k in self.slots])
        for k in self.gone:
            values[k] = None


@dataclass(frozen=True, slots=True)
class _Called:
    """A part: `gone` are the inputs that it reads last, `copies` the values that it passes to other stages of
    this rank, `after` the values dead after that. Of each sum: slot, reduction, and whether it starts here.
    """

    part: LoopPart
    micro: int
    adding: bool
    inputs: list[int]
    gone: list[int]
    outputs: list[int]
    sums: list[tuple[int, str, bool]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    after: list[int] = field(default_factory=list)

    def play(self, values: list[Any], engine: BodyEngine) -> None:
        inputs = [values[k] for k in self.inputs]
        for k in self.gone:
            values[k] = None
        outputs, summed = engine.call(self.part, inputs, self.micro, adding=self.adding)
        for k, x in zip(self.outputs, outputs, strict=True):
            values[k] = x
        self.gather(values, summed, engine)
        for source, k in self.copies:
            values[k] = values[source]
        for k in self.after:
            values[k] = None

    def gather(self, values: list[Any], summed: list[Any], engine: BodyEngine) -> None:
        """Add the terms to the totals."""
        for (k, op, first), x in zip(self.sums, summed, strict=True):
            if first:
                values[k] = [x] if op == "join" else x
            elif op == "join":
                values[k].append(x)
            else:
                values[k] = engine.add(values[k], x, op)


def play(row: Row, given: Sequence[Any], engine: BodyEngine) -> list[Any]:
    """Play a row on `given`, the operands of its loop; returns the results of its body in order."""
    values: list[Any] = [None] * row.num_values
    for k, x in zip(row.given, given, strict=True):
        values[k] = x
    for entry in row.entries:
        entry.play(values, engine)
    results = []
    for k, how in zip(row.results, row.joins, strict=True):
        total, values[k] = values[k], None  # frees the parts of one join before the next
        results.append(total if how is None else engine.join(total, how.dim, how.outer))
    return results


ADD: dict[str, Callable[..., Tensor]] = {
    "sum": torch.Tensor.add_,
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "prod": torch.Tensor.mul_,
}
