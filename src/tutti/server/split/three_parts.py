"""Splits the captured step in three: the worker's part, the coupling, and the update of each variable.

    worker    forward, backward -> one gradient a variable, the step's results, buffers' new values
    coupling  the gradient of each variable -> sums; all sums and numbers -> scalars (a clip coefficient)
    update    gradient, state and scalars of one variable -> its new state

The three follow from the graph alone: the update is all nodes that depend on a gradient after the last
backward. In it only reductions of one gradient to one number may couple variables; nodes on such numbers are
the coupling; the other ancestors of a variable's new state belong to that variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.captured import Captured
from tutti.errors import CaptureError
from tutti.graph.text import op_name
from tutti.server.protocol.update import WEIGHT, ServedVariable
from tutti.server.split.divisible import is_divisible
from tutti.server.split.origins import NUMBERS, Origins, refused
from tutti.server.split.piece import Cut, GraphPiece, from_number
from tutti.server.split.sparse_tables import TableLookup, lookup_of

GRADIENT = "gradient"
GIVEN = "given."


@dataclass(frozen=True)
class Owned:
    """A variable with its part of the update.

    gradient: its gradient, a value of the whole graph.
    sums: `gradient` and numbers to the summands over blocks; None if there are none.
    update: `gradient`, `weight`, slots and numbers to the new values of `weight` and slots.
    lookup: of a table whose rows travel alone.
    """

    variable: ServedVariable
    gradient: fx.Node
    sums: GraphPiece | None
    update: GraphPiece
    lookup: TableLookup | None = None


@dataclass(frozen=True)
class Split:
    """A split captured step.

    owned: the variables, in the model's order.
    given: values of the forward that updates read, by name (a count of tokens); numbers.
    scalars: values of the coupling that updates read, or that the step returns, by name; numbers.
    coupling: all sums, by name, and numbers to the scalars; None if there are none.
    returned: the names of the scalars that the step returns, by position among its leaves.
    """

    captured: Captured
    owned: tuple[Owned, ...]
    given: dict[str, fx.Node]
    scalars: dict[str, fx.Node]
    coupling: GraphPiece | None
    returned: dict[int, str]

    @property
    def numbers(self) -> list[str]:
        """The numbers for updates and coupling: hyper-parameters, floats of the batch, `given`."""
        pieces = [o.update for o in self.owned] + [o.sums for o in self.owned if o.sums]
        pieces += [self.coupling] if self.coupling is not None else []
        read = {n for piece in pieces for n in piece.inputs}
        known = [n for n in self.captured.inputs if self.captured.kinds[n] in NUMBERS]
        return [n for n in (*known, *self.given) if n in read]


def split(captured: Captured, *, tables: frozenset[str] | None = None) -> Split:
    """Split a captured step.

    Args:
        tables: those that may travel by row; by default every one that is large enough.

    Raises:
        CaptureError: the update cannot run apart from the step, with the node and the reason.
    """
    return _Splitter(captured, tables).split()


@dataclass
class _Own:
    """One variable's state by short name, its gradient, and the nodes of its update."""

    name: str
    new: dict[str, fx.Node]
    nodes: list[fx.Node] = field(default_factory=list)
    gradient: fx.Node | None = None


class _Splitter:
    def __init__(self, captured: Captured, tables: frozenset[str] | None) -> None:
        self.captured, self.tables = captured, tables
        self.made = Origins(captured)
        self.inputs = self.made.inputs
        self.given: dict[fx.Node, str] = {}

    def split(self) -> Split:
        owned = [self._follow(one) for one in self._variables()]
        by_gradient: dict[fx.Node, _Own] = {}
        for one in owned:
            assert one.gradient is not None
            by_gradient.setdefault(one.gradient, one)
        scalars = self._scalars(owned)
        returned = self._returned()
        coupled = {**scalars, **{f"returned.{i}": n for i, n in returned.items()}}
        for node in (*coupled.values(), *self.given):
            if isinstance(node.meta["val"], Tensor) and node.meta["val"].is_complex():
                raise refused(node, "makes a complex number", "numbers travel as float64")
        used = self._reductions_of(coupled.values())
        sums = {n: f"sum.{i}" for i, n in enumerate(used)}
        of: dict[str, dict[str, fx.Node]] = {}
        for node, name in sums.items():
            of.setdefault(self._home(node, by_gradient).name, {})[name] = node
        return Split(
            captured=self.captured,
            owned=tuple(self._owned(one, scalars, of.get(one.name, {})) for one in owned),
            given={name: n for n, name in self.given.items()},
            scalars=coupled,
            coupling=self._coupling(coupled, sums) if coupled else None,
            returned={i: f"returned.{i}" for i in returned},
        )

    # The variables

    def _variables(self) -> Iterator[_Own]:
        """Parameters that the update changes, each with its slots."""
        new = dict(zip(self.captured.updated, self.captured.output[1], strict=True))
        late = {name: n for name, n in new.items() if n in self.made.update}
        slots: dict[str, dict[str, fx.Node]] = {}
        for s in self.captured.state:
            if s.kind == "slot" and s.name in late:
                slots.setdefault(s.owner, {})[s.slot] = late.pop(s.name)
        for s in self.captured.state:
            if s.kind == "parameter" and s.name in late:
                yield _Own(s.name, {WEIGHT: late.pop(s.name), **slots.pop(s.name, {})})
        for name in (*late, *slots):
            raise CaptureError(
                f'the update changes "{name}", which is neither trained nor state of a trained variable',
                why="servers keep each variable with its slots, and update it from its gradient",
                fix="change it in the forward, or outside the step (a moving average of weights)",
            )

    def _follow(self, one: _Own) -> _Own:
        """Find the ancestors of a variable's new state, up to reductions."""
        cut = Cut(self.captured.owner, dict.fromkeys((*self.inputs, *self.made.reductions), ""))
        found = cut.ancestors(one.new.values())
        one.nodes = [n for n in found if n in self.made.update and n not in self.made.reductions]
        before = dict.fromkeys(
            x for n in one.nodes for x in n.all_input_nodes if x not in self.made.update
        )
        gradients = [x for x in before if self.made.is_gradient(x)]
        if len(gradients) != 1:
            raise refused(
                one.new[WEIGHT],
                f'makes "{one.name}" of {len(gradients)} gradients',
                "each variable is updated from its own gradient, where it lies",
            )
        one.gradient = gradients[0]
        own = {s.name for s in self._state_of(one.name)}
        for x in before:
            self._check_read(one, x, own)
        return one

    def _check_read(self, one: _Own, x: fx.Node, own: set[str]) -> None:
        name = self.inputs.get(x, "")
        kind = self.captured.kinds.get(name, "")
        if x is one.gradient or kind in NUMBERS or x.op == "get_attr" or name in own:
            return
        val = x.meta["val"]
        if isinstance(val, Tensor) and val.numel() != 1:
            raise refused(
                one.new[WEIGHT],
                f'reads "{name or op_name(x)}" to update "{one.name}"',
                "a server has a variable's own state, its gradient and numbers",
            )
        self.given.setdefault(x, f"{GIVEN}{len(self.given)}")

    def _state_of(self, name: str) -> Iterator[Any]:
        return (s for s in self.captured.state if name in (s.name, s.owner))

    # Coupling

    def _scalars(self, owned: Iterable[_Own]) -> dict[str, fx.Node]:
        """The values of the coupling that updates read, by name."""
        found: dict[fx.Node, None] = {}
        for one in owned:
            for node in one.nodes:
                if not self.made.is_scalar(node):
                    found |= dict.fromkeys(filter(self.made.is_scalar, node.all_input_nodes))
            found |= dict.fromkeys(n for n in one.new.values() if self.made.is_scalar(n))
        for node in found:
            val = node.meta["val"]
            if isinstance(val, Tensor) and val.numel() != 1:
                raise refused(node, "couples variables by more than one number", "")
        return {f"scalar.{i}": node for i, node in enumerate(found)}

    def _returned(self) -> dict[int, fx.Node]:
        """The leaves that the step returns from its update."""
        found = {}
        for i, x in enumerate(self.captured.output[0]):
            if isinstance(x, fx.Node) and x in self.made.update:
                if not self.made.is_scalar(x):
                    raise refused(
                        x,
                        "is returned by the step, and made of one variable's update",
                        "servers give back weights, and numbers such as the gradient norm",
                    )
                found[i] = x
        return found

    def _reductions_of(self, values: Iterable[fx.Node]) -> list[fx.Node]:
        cut = Cut(self.captured.owner, dict.fromkeys(self.made.reductions, ""))
        return [n for n in cut.ancestors(values) if n in self.made.reductions]

    def _home(self, node: fx.Node, by_gradient: dict[fx.Node, _Own]) -> _Own:
        """The variable whose gradient a reduction reduces."""
        (gradient,) = (x for x in self.made.reads[node] if self.made.is_gradient(x))
        if gradient not in by_gradient:
            raise refused(
                node,
                "counts the gradient of a parameter that no optimizer of the step trains",
                "gradients meet where their variables are kept",
            )
        return by_gradient[gradient]

    def _coupling(self, wanted: dict[str, fx.Node], sums: dict[fx.Node, str]) -> GraphPiece:
        adapt = {n: self.made.reductions[n].adapt for n in sums}
        return self._cut(dict(sums), adapt).piece(wanted)

    # Pieces

    def _cut(self, inputs: dict[fx.Node, str], adapt: dict[fx.Node, Any]) -> Cut:
        """Numbers may enter any piece."""
        numbers = {
            n: name for n, name in self.inputs.items() if self.captured.kinds[name] in NUMBERS
        }
        for x in self.given:
            adapt[x] = from_number
        return Cut(self.captured.owner, {**inputs, **numbers, **self.given}, adapt)

    def _owned(self, one: _Own, scalars: dict[str, fx.Node], sums: dict[str, fx.Node]) -> Owned:
        assert one.gradient is not None
        state = list(self._state_of(one.name))
        inputs: dict[fx.Node, str] = {one.gradient: GRADIENT}
        for s in state:
            inputs[self.captured.placeholder(s.name)] = s.slot or WEIGHT
        summed = self._sums(one, sums) if sums else None
        inputs |= {n: name for name, n in scalars.items()}
        update = self._cut(inputs, dict.fromkeys(scalars.values(), from_number)).piece(one.new)
        weight = self.captured.placeholder(one.name).meta["val"]
        slots = {s.slot: (tuple(s.tensor.shape), s.tensor.dtype) for s in state if s.kind == "slot"}
        additive = all(self.made.reductions[n].additive for n in sums.values())
        pieces = [p for p in (update, summed) if p is not None]
        whole = tuple(int(n) for n in weight.shape)
        divisible = additive and all(is_divisible(p, whole) for p in pieces)
        may = divisible and (self.tables is None or one.name in self.tables)
        lookup = lookup_of(self.captured, one.name, one.gradient) if may else None
        if lookup is not None and summed is not None and not _nothing_of_zeros(summed, whole):
            lookup = None
        return Owned(
            ServedVariable(
                name=one.name,
                shape=whole,
                dtype=weight.dtype,
                slots=slots,
                divisible=divisible and lookup is None,
                rows=lookup is not None,
            ),
            one.gradient,
            summed,
            update,
            lookup,
        )

    def _sums(self, one: _Own, sums: dict[str, fx.Node]) -> GraphPiece:
        """The first halves of the reductions of one gradient."""
        assert one.gradient is not None
        cut = self._cut({one.gradient: GRADIENT}, {})
        operands = {name: self.made.reductions[n].operand for name, n in sums.items()}
        piece = cut.piece(operands)
        graph, output = piece.graph, piece.graph.output_node()
        found: Any = output.args[0]
        graph.erase_node(output)
        graph.output(
            [
                self.made.reductions[n].first(graph, x)
                for n, x in zip(sums.values(), found, strict=True)
            ]
        )
        return piece


def _nothing_of_zeros(sums: GraphPiece, whole: tuple[int, ...]) -> bool:
    """Whether rows without a gradient add nothing to the sums of a table."""
    if sums.inputs != (GRADIENT,):
        return False
    return not any(float(x) for x in sums({GRADIENT: torch.zeros((1, *whole[1:]))}).values())
