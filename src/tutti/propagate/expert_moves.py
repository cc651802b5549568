"""Moves rows to the ranks of their experts and back: two all-to-alls a layer and direction.

    rows (S, K)  ->  expert_mm  ->  silu(gate) * up  ->  expert_mm  ->  rows (S, K)          becomes
    rows  ->  to_experts  ->  all-to-all  ->  the same on slots  ->  all-to-all  ->  from_experts  ->  rows

Slots are (group, block, place): a group for each rank of `expert`, a block for each part of the batch. The
blocks hold the rows of the ranks before the first all-to-all; moving `expert` from the blocks to the groups
is that all-to-all. The ops between two products that treat each row by itself run on slots, in the backward
too. If `expert` does not split the batch, each of its ranks has all rows: it takes those of its experts
without communication, and the results are pending sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.captured import Captured
from tutti.graph.edits.edit import Editor, Emit, erase_dead, shaped
from tutti.graph.ops.expert_rows import (
    PRODUCTS,
    expert_mm,
    expert_outer,
    expert_slots,
    from_experts,
    to_experts,
)
from tutti.layout import Mesh, Segment, Sharding, canonical
from tutti.rules import is_tensor_call, operands_of
from tutti.rules.book import Book
from tutti.rules.rule import shape

EXPERT = "expert"
_RESHAPE, _CAST = torch.ops.aten.reshape.default, torch.ops.aten._to_copy.default
# Gives the compute sharding of a parameter that the user, a search or an earlier step has placed.
Placed = Callable[[str], Sharding | None]


@dataclass
class ExpertMoves:
    """The shardings of the values on slots.

    Those in `held` change to theirs at once, by an all-to-all; it maps each to the experts of its slots.
    """

    seeds: dict[fx.Node, Sharding] = field(default_factory=dict)
    held: dict[fx.Node, fx.Node] = field(default_factory=dict)


def products_of(captured: Captured) -> dict[fx.Node, list[fx.Node]]:
    """The products of rows with weights of experts, by their index of experts."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in captured.graph.nodes:
        if node.target in PRODUCTS and node.args[4] == 1:
            found.setdefault(node.args[2], []).append(node)
    return found


def movable(captured: Captured, mesh: Mesh, placed: Placed) -> list[list[fx.Node]]:
    """The products whose weights are all split over `expert`, by experts; by the index of each."""
    if EXPERT not in mesh or mesh.size(EXPERT) == 1:
        return []
    names = {node: name for name, node in captured.placeholders.items()}
    groups = products_of(captured).values()
    return [g for g in groups if _are_split([n for n in g if n.target is expert_mm], names, placed)]


def _are_split(products: Sequence[fx.Node], names: dict[fx.Node, str], placed: Placed) -> bool:
    weights = dict.fromkeys(_source(n.args[1]) for n in products)  # in the order of the graph
    shardings = [placed(names[w]) if w in names else None for w in weights]
    return bool(shardings) and all(
        s is not None and tuple(a for seg in s.dims[0] for a in seg.axes) == (EXPERT,)
        for s in shardings
    )


def _source(x: Any) -> fx.Node:
    """The parameter of which `x` is a cast."""
    while x.target is _CAST:
        x = x.args[0]
    return x


def insert_moves(
    captured: Captured, mesh: Mesh, groups: Sequence[list[fx.Node]], batch_axes: tuple[str, ...]
) -> ExpertMoves:
    """Rewrite the graph so that these products run on slots.

    `batch_axes` split the samples, and so the rows, major to minor; `expert`, if it is one, is the last.
    """
    made, book = ExpertMoves(), Book()
    for products in groups:
        _Mover(captured, mesh, products, batch_axes, made, book).write()
    if groups:
        erase_dead(captured.graph)
        captured.graph.lint()
    return made


class _Mover:
    """Moves the products of one index of experts."""

    def __init__(
        self,
        captured: Captured,
        mesh: Mesh,
        products: list[fx.Node],
        batch_axes: tuple[str, ...],
        made: ExpertMoves,
        book: Book,
    ) -> None:
        self.graph, self.mesh, self.made, self.book = captured.graph, mesh, made, book
        self.editor = Editor(captured.graph, captured.mode)
        self.products = dict.fromkeys(products)
        self.experts: Any = products[0].args[2]
        self.num_rows = shape(self.experts)[0]
        self.num_experts = next(shape(n.args[1])[0] for n in products if n.target is expert_mm)
        self.groups = mesh.size(EXPERT)
        blocks = mesh.size(batch_axes)
        divides = self.num_rows % blocks == 0
        self.batch_axes = batch_axes if divides else ()
        self.room = self.num_rows // (blocks if divides else 1)
        self.between = self._between()
        self.on_slots: dict[fx.Node, fx.Node] = {}
        self.moved: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        self.slots: fx.Node | None = None

    def write(self) -> None:
        slots: fx.Node | None = None
        for node in [n for n in self.graph.nodes if n in self.products or n in self.between]:
            emit = self.editor.at(node)
            if slots is None:
                slots = self._experts_of_slots(emit)
            if node in self.products:
                self._product(emit, node, slots)
            else:
                self._copy(emit, node)
        for node, flat in self.on_slots.items():
            outside = [u for u in node.users if u not in self.products and u not in self.between]
            if outside:
                back = self._back(self.editor.at(node), flat, node)
                for user in outside:
                    user.replace_input_with(node, back)

    def _between(self) -> set[fx.Node]:
        """The ops on results of products that treat each row by itself and lead to another product."""
        found: set[fx.Node] = {n for n in self.products if n.target is expert_mm}
        ordered = [n for n in self.graph.nodes if is_tensor_call(n)]
        for node in ordered:
            if node not in self.products and self._is_by_row(node, found):
                found.add(node)
        kept: set[fx.Node] = set()
        for node in reversed([n for n in ordered if n in found and n not in self.products]):
            if any(u in kept or node in self._row_operands(u) for u in node.users):
                kept.add(node)
        return kept

    def _row_operands(self, user: fx.Node) -> tuple[Any, ...]:
        if user not in self.products:
            return ()
        return user.args[:2] if user.target is expert_outer else user.args[:1]

    def _is_by_row(self, node: fx.Node, rows: set[fx.Node]) -> bool:
        operands = operands_of(node)
        if not operands or not all(x in rows for x in operands):
            return False
        rule = self.book.of(node) if isinstance(node.meta["val"], Tensor) else None
        return rule is not None and rule.keeps_rows(self.num_rows)

    def _product(self, emit: Emit, node: fx.Node, slots: fx.Node) -> None:
        x, other, _, how = node.args[:4]
        rest = (self.groups, self.groups)
        if node.target is expert_mm:
            new = emit(expert_mm, self._rows(emit, x), other, slots, how, *rest)
            self.on_slots[node] = self._seeded(new)
        else:
            rows = (self._rows(emit, x), self._rows(emit, other))
            new = emit(expert_outer, *rows, slots, how, *rest)
            self.editor.replace(node, new)
            new.name = node.name  # a gradient keeps the name of its value in the captured graph

    def _copy(self, emit: Emit, node: fx.Node) -> None:
        """An op between products, on slots; a shape among its arguments has the number of slots first."""
        rule = self.book.of(node)
        assert rule is not None
        args: list[Any] = list(fx.map_arg(node.args, lambda n: self.on_slots.get(n, n)))
        if rule.shape_argument is not None:
            given = args[rule.shape_argument]
            args[rule.shape_argument] = [self.groups * self.num_rows, *given[1:]]
        kwargs = fx.map_arg(node.kwargs, lambda n: self.on_slots.get(n, n))
        self.on_slots[node] = self._seeded(emit(node.target, *args, **kwargs))

    def _rows(self, emit: Emit, x: Any) -> fx.Node:
        """The operand of a product on slots; all views of one value move once."""
        if x in self.on_slots:
            return self.on_slots[x]
        base = x
        while base.target is _RESHAPE:
            base = base.args[0]
        key = base, shape(x)
        if key not in self.moved:
            given = (self.experts, self.num_experts, self.groups, self.room)
            moved = emit(to_experts, x, *given)
            self.moved[key] = self._flat(emit, moved)
        return self.moved[key]

    def _experts_of_slots(self, emit: Emit) -> fx.Node:
        given = (self.experts, self.num_experts, self.groups, self.room)
        slots = emit(expert_slots, *given)
        flat = self._flat(emit, slots)
        self.slots = slots
        return flat

    def _flat(self, emit: Emit, moved: fx.Node) -> fx.Node:
        """Slots as one dim, on the ranks of their groups."""
        _, _, _, *rest = shape(moved)
        self.made.seeds[moved] = self._sharding(rest, self._before())
        self.made.held[moved] = self.slots or moved
        return self._seeded(shaped(emit, moved, [self.groups * self.num_rows, *rest]))

    def _back(self, emit: Emit, flat: fx.Node, like: fx.Node) -> fx.Node:
        """The rows of values on slots, on the ranks where they were."""
        _, *rest = shape(flat)
        blocks = self.num_rows // self.room
        apart = shaped(emit, flat, [self.groups, blocks, self.room, *rest])
        if EXPERT in self.batch_axes:
            whole = Segment(self.groups)
            blocked = Segment(blocks, self.batch_axes)
            dims = ((whole,), (blocked,), *((Segment(n),) for n in (self.room, *rest)))
            self.made.seeds[apart] = Sharding(dims)
            assert self.slots is not None
            self.made.held[apart] = self.slots
        back = emit(from_experts, apart, self.experts, self.num_experts, self.groups)
        assert back.meta["val"].shape == like.meta["val"].shape
        return back

    def _before(self) -> tuple[str, ...]:
        """The axes of the blocks while `expert` splits the groups."""
        return tuple(a for a in self.batch_axes if a != EXPERT)

    def _sharding(self, rest: Sequence[int], blocks: tuple[str, ...]) -> Sharding:
        num_blocks = self.num_rows // self.room
        lead = (Segment(self.groups, (EXPERT,)), Segment(num_blocks, blocks))
        return Sharding(tuple((s,) for s in (*lead, Segment(self.room), *map(Segment, rest))))

    def _seeded(self, flat: fx.Node) -> fx.Node:
        """A value on slots in one dim, with its sharding."""
        _, *rest = shape(flat)
        dims = self._sharding((), self._before()).dims
        slots = canonical([s for dim in dims for s in dim], self.mesh)
        self.made.seeds[flat] = Sharding((slots, *((Segment(n),) for n in rest)))
        return flat
