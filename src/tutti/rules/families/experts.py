"""Rows of experts: products split by row, by expert, or by the dims of the weights; moves split by block.

a product      s k, e n k, s -> s n            a rank of e multiplies its experts' rows, zeros else
on slots       (g r) k, (g e) n k, (g r) -> (g r) n        e within a group stays whole
to_experts     (b s) k, (b s) -> g b s k       a rank of g keeps its groups' slots
from_experts   g b s k, (b s) -> (b s) k       a rank of g gives its groups' rows, zeros else
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.graph.ops.expert_rows import (
    expert_mm,
    expert_outer,
    expert_slots,
    from_experts,
    to_experts,
)
from tutti.rules.families.part_ops import LocalCall, own_rows
from tutti.rules.rule import Rule, groups, operands_of, parse_rule, shape

aten = torch.ops.aten
# The factor of the experts in products of rows.
EXPERTS = "e"


def _bound(node: fx.Node, text: str, sizes: dict[str, int], **options: Any) -> Rule:
    operands = [shape(x) for x in operands_of(node)]
    return parse_rule(text, operands, [shape(node)], sizes=sizes, **options)


def _expert_mm(node: fx.Node) -> Rule:
    given: Any = node.args
    rows, weight, num_groups = shape(given[0])[0], shape(given[1]), given[4]
    stacked = "k n" if given[3] else "n k"
    linear = groups((0,), (1,))
    if num_groups == 1:
        rule = _bound(node, f"r k, e {stacked}, r -> r n", {}, linear=linear)
        rule.parts["e"] = _flat_mm_part
        return rule
    sizes = {"g": num_groups, "r": rows // num_groups, "e": weight[0] // num_groups}
    text = f"(g r) k, (g e!) {stacked}, (g r) -> (g r) n"
    rule = _bound(node, text, sizes, linear=linear)
    rule.parts["g"] = _grouped_mm_part
    return rule


def _expert_outer(node: fx.Node) -> Rule:
    given: Any = node.args
    rows, weight, num_groups = shape(given[0])[0], shape(node), given[4]
    options: Any = {"linear": groups((0,), (1,)), "shape_argument": 3}
    if num_groups == 1:
        rule = _bound(node, "r n, r k, r -> e n k", {}, **options)
        rule.parts["e"] = _flat_outer_part
        return rule
    sizes = {"g": num_groups, "r": rows // num_groups, "e": weight[0] // num_groups}
    rule = _bound(node, "(g r) n, (g r) k, (g r) -> (g e!) n k", sizes, **options)
    rule.parts["g"] = _grouped_outer_part
    return rule


def _to_experts(node: fx.Node) -> Rule:
    given: Any = node.args
    x, room = shape(given[0]), given[4]
    rest = " ".join(f"k{i}" for i in range(len(x) - 1))
    sizes = {"b": x[0] // room, "s": room}
    text = f"(b s!) {rest}, (b s!) -> g b s! {rest}"
    rule = _bound(node, text, sizes, linear=groups((0,)))
    rule.parts["g"] = _to_experts_part
    return rule


def _expert_slots(node: fx.Node) -> Rule:
    given: Any = node.args
    sizes = {"b": shape(given[0])[0] // given[3], "s": given[3]}
    rule = _bound(node, "(b s!) -> g b s!", sizes)
    rule.parts["g"] = _expert_slots_part
    return rule


def _from_experts(node: fx.Node) -> Rule:
    given: Any = node.args
    slots = shape(given[0])
    rest = " ".join(f"k{i}" for i in range(len(slots) - 3))
    sizes = {"b": slots[1], "s": slots[2]}
    text = f"g b s! {rest}, (b s!) -> (b s!) {rest}"
    rule = _bound(node, text, sizes, linear=groups((0,)))
    rule.parts["g"] = _from_experts_part
    return rule


def _counted_within(part: LocalCall, experts: Any, positions: fx.Node) -> fx.Node:
    """`experts` counted among those at `positions`; -1 for those of other ranks."""
    local, inside = own_rows(part, experts, positions)
    return part.emit(aten.where.self, inside, local, part.emit(aten.full_like.default, local, -1))


def _flat_mm_part(part: LocalCall) -> fx.Node:
    """Multiplies the rows of this rank's experts; the sum over ranks has every row."""
    x, weight, experts, *rest = part.args
    return part.emit(
        expert_mm, x, weight, _counted_within(part, experts, part.positions(1, 0)), *rest
    )


def _flat_outer_part(part: LocalCall) -> fx.Node:
    """Drops the rows of other ranks' experts."""
    a, b, experts, _, *rest = part.args
    own = _counted_within(part, experts, part.positions(-1, 0))
    return part.emit(expert_outer, a, b, own, part.result_shape(), *rest)


def _grouped_mm_part(part: LocalCall) -> fx.Node:
    """This rank's groups: as many as its part of the experts has."""
    x, weight, experts, transposed, num_groups, padding = part.args
    every: Any = part.node.args[1]
    mine = num_groups * _size(weight) // shape(every)[0]
    return part.emit(expert_mm, x, weight, experts, transposed, mine, padding)


def _grouped_outer_part(part: LocalCall) -> fx.Node:
    a, b, experts, _, num_groups, padding = part.args
    local = part.result_shape()
    mine = num_groups * local[0] // shape(part.node)[0]
    return part.emit(expert_outer, a, b, experts, local, mine, padding)


def _own_groups(
    part: LocalCall, experts: Any, num_experts: int, num_groups: int, positions: fx.Node
) -> tuple[fx.Node, int, int]:
    """`experts` counted within this rank's groups, their number, and that of these groups."""
    each, mine = num_experts // num_groups, _size(positions)
    group = part.emit(aten.div.Scalar_mode, experts, each, rounding_mode="floor")
    local = _counted_within(part, group, positions)
    within = part.emit(aten.remainder.Scalar, experts, each)
    first = part.emit(aten.mul.Tensor, local, each)
    own = part.emit(aten.add.Tensor, first, within)
    none = part.emit(aten.lt.Scalar, local, 0)
    own = part.emit(aten.where.self, none, local, own)
    return own, mine * each, mine


def _to_experts_part(part: LocalCall) -> fx.Node:
    """The slots of this rank's groups."""
    x, experts, num_experts, num_groups, room = part.args
    own = _own_groups(part, experts, num_experts, num_groups, part.positions(-1, 0))
    return part.emit(to_experts, x, *own, room)


def _expert_slots_part(part: LocalCall) -> fx.Node:
    experts, num_experts, num_groups, room = part.args
    own = _own_groups(part, experts, num_experts, num_groups, part.positions(-1, 0))
    return part.emit(expert_slots, *own, room)


def _from_experts_part(part: LocalCall) -> fx.Node:
    """Zeros for rows in other ranks' groups; the sum over ranks has every row."""
    slots, experts, num_experts, num_groups = part.args
    own = _own_groups(part, experts, num_experts, num_groups, part.positions(0, 0))
    return part.emit(from_experts, slots, *own)


def _size(x: Any) -> int:
    return int(x.meta["val"].shape[0])


RULES = {
    expert_mm: _expert_mm,
    expert_outer: _expert_outer,
    to_experts: _to_experts,
    expert_slots: _expert_slots,
    from_experts: _from_experts,
}
