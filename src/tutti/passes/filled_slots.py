"""`filled_slots`: computes on the filled slots of experts alone, not on room for the worst case.

    %4 = to_experts(%x, %e)                        %5 = to_filled(%x, %e, %num)
    %5 = cut_slots(%4, %num)
    %6 = all_to_all(%5)                            %6 = all_to_all(%5)
    %7 = fill_slots(%6)
    %8 = reshape(%7, [128, 16])                    %8 = reshape(%6, [-1, 16])
    %9 = expert_mm(%8, %w, %s)              ->     %9 = expert_mm(%8, %w, %s)
    %10 = silu(%9)                                 %10 = silu(%9)
    %11 = reshape(%10, [2, 2, 32, 16])
    %12 = cut_slots(%11, %num)                     %12 = reshape(%10, [2, 2, -1, 16])
    %13 = all_to_all(%12)                          %13 = all_to_all(%12)
    %14 = fill_slots(%13)
    %15 = from_experts(%14, %e)                    %15 = from_experts(%13, %e)

Ranks agree on `%num`, the most slots that a block fills (`graph.ops.expert_rows`). Ops that treat each slot
by itself give the same numbers on those slots; nothing reads what they give on empty ones. So values between
the all-to-alls have a size of the call, and their fake values that of evenly chosen experts. If another op
reads slots, those with its `%num` stay as they are.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from tutti.graph.edits.edit import Editor, erase_dead
from tutti.graph.ops import collectives
from tutti.graph.ops.expert_rows import (
    PRODUCTS,
    cut_slots,
    expert_outer,
    fill_slots,
    from_experts,
    to_experts,
    to_filled,
)
from tutti.rules import is_tensor_call, operands_of
from tutti.rules.book import Book
from tutti.rules.rule import shape

aten = torch.ops.aten
_RESHAPE = aten.reshape.default
_NUM_LEAD = 3  # group, block, slot
_PADDING = 5  # the position of a product's number of slots for each row


def filled_slots(graph: fx.Graph) -> int:
    """Rewrite `graph`; returns the number of all-to-alls whose slots are no longer filled up."""
    by_num: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=fill_slots):
        moved = node.args[0]
        if moved.target is collectives.all_to_all and moved.args[0].target is cut_slots:
            by_num.setdefault(moved.args[0].args[1], []).append(node)
    book, count = Book(), 0
    for num, fills in by_num.items():
        slots = _Slots(graph, num, fills, book)
        if slots.stay_filled():
            slots.write()
            count += len(fills)
    if count:
        erase_dead(graph)
    return count


class _Slots:
    """The values on the slots of which `num` are filled."""

    def __init__(self, graph: fx.Graph, num: fx.Node, fills: list[fx.Node], book: Book) -> None:
        self.graph, self.num, self.book = graph, num, book
        self.fills = dict.fromkeys(fills)
        self.num_rows = math.prod(shape(fills[0])[:_NUM_LEAD])
        self.flat: dict[fx.Node, None] = {}  # in the order of the graph
        self.back: dict[fx.Node, None] = {}

    def stay_filled(self) -> bool:
        """Whether nothing but an op on single slots reads them."""
        for node in self.graph.nodes:
            if node in self.fills:
                continue
            reads = [x for x in node.all_input_nodes if x in self.fills or x in self.flat]
            if reads and not self._is_known(node):
                return False
        return all(self._is_cut(user) for node in self.back for user in node.users)

    def _is_known(self, node: fx.Node) -> bool:
        """Whether a reader of slots treats each by itself; notes what it gives."""
        first: Any = node.args[0] if node.args else None
        if first in self.fills:
            if node.target is _RESHAPE and shape(node)[:1] == (self.num_rows,):
                self.flat[node] = None
                return True
            return node.target is from_experts
        if node.target in PRODUCTS:
            return self._is_product(node)
        if node.target is operator.getitem:
            self.flat[node] = None
            return True
        if node.target is _RESHAPE and math.prod(shape(node)[:_NUM_LEAD]) == self.num_rows:
            self.back[node] = None
            return True
        if not is_tensor_call(node) or not all(x in self.flat for x in operands_of(node)):
            return False
        rule = self.book.of(node)
        if rule is None or rule.shape_argument is not None or not rule.keeps_rows(self.num_rows):
            return False
        self.flat[node] = None
        return True

    def _is_product(self, node: fx.Node) -> bool:
        x, other, experts = node.args[:3]
        if x not in self.flat or experts not in self.flat:
            return False
        if node.target is expert_outer:
            return other in self.flat
        self.flat[node] = None
        return other not in self.flat

    def _is_cut(self, node: fx.Node) -> bool:
        return node.target is cut_slots and node.args[1] is self.num

    def write(self) -> None:
        editor = Editor(self.graph)
        for fill in self.fills:
            fill.replace_all_uses_with(fill.args[0])  # type: ignore[arg-type]
        for node in self.flat:
            if node.target is _RESHAPE:
                node.update_arg(1, [-1, *shape(node)[1:]])
            self._renewed(editor, node)
        for node in [n for n in self.graph.nodes if n.target in PRODUCTS]:
            if node.args[2] in self.flat:
                node.update_arg(_PADDING, 1)
        for node in [n for n in self.graph.nodes if self._is_cut(n)]:
            self._cut(editor, node)

    def _cut(self, editor: Editor, cut: fx.Node) -> None:
        """The filled slots that an all-to-all takes, without the others."""
        whole: Any = cut.args[0]
        if whole in self.back:
            groups, blocks, _, *rest = shape(whole)
            filled = editor.at(cut)(_RESHAPE, whole.args[0], [groups, blocks, -1, *rest])
        elif whole.target is to_experts and len(whole.users) == 1:
            filled = editor.at(cut)(to_filled, *whole.args, *cut.args[1:])
        else:
            return
        editor.replace(cut, filled)

    def _renewed(self, editor: Editor, node: fx.Node) -> None:
        if node.target is operator.getitem:
            several: Any = node.args[0]
            node.meta["val"] = several.meta["val"][node.args[1]]
        else:
            node.meta["val"] = editor.value(node.target, node.args, dict(node.kwargs))
        node.meta.pop("sharding", None)
