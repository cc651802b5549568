"""Which values of a graph may share memory."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.ops import collectives
from tutti.torch_private.op_tables import OpOverload, has_kernel, schema_of

aten = torch.ops.aten

# Kinds of `together_` that return their operands.
IN_PLACE = ("all_reduce", "reduce_part")

# Ops that are not element by element, whose results are contiguous for contiguous operands.
_IN_ORDER = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.linear.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.embedding.default,
    aten.native_layer_norm.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._to_copy.default,
)


def roots_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each tensor to the value whose memory it may share, or to itself for fresh memory."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            source = aliased(node)
            known = None if source is None else roots.get(source)
            roots[node] = node if known is None else known
    return roots


def aliased(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the result of `node` may share, or None for fresh memory."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _part_of_several(node)
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    first: Any = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) and _is_view(node.target) else None


def viewed(node: fx.Node) -> fx.Node | None:
    """The operand of which `node` is a view that computes nothing; None for an op in place, too."""
    return None if written(node) else aliased(node)


def itself(node: fx.Node) -> fx.Node | None:
    """The operand that `node` returns, the same tensor object; None for a new tensor.

    Functions that overwrite lists, and in-place collectives, return operands.
    """
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    several: Any = node.args[0]
    in_place = several.target is collectives.together_ and several.args[0] in IN_PLACE
    return _part_of_several(node) if in_place or hasattr(several.target, "written") else None


def written(node: fx.Node) -> list[fx.Node]:
    """The operands that `node` overwrites.

    A function that overwrites lists has the attribute `written`: the positions of these lists. Its results
    are their tensors, in order.
    """
    target: Any = node.target
    if hasattr(target, "written"):
        return [x for k in target.written for x in node.args[k]]  # type: ignore[union-attr]
    return marked(node, writes=True)


def marked(node: fx.Node, *, writes: bool) -> list[fx.Node]:
    """The operands, those in lists too, that the schema of PyTorch's op marks as written, or as aliases of
    results."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return []
    names = _marked_arguments(target, writes)
    if not names:
        return []
    given = [node.args[i] if i < len(node.args) else node.kwargs.get(n) for i, n in names]
    found: list[fx.Node] = []
    fx.map_arg(given, found.append)
    return found


@cache
def _marked_arguments(target: OpOverload, writes: bool) -> list[tuple[int, str]]:
    return [
        (i, a.name)
        for i, a in enumerate(schema_of(target).arguments)
        if a.alias_info is not None and (a.alias_info.is_write or not writes)
    ]


def is_function(node: fx.Node) -> bool:
    """Whether `node` is a deterministic op without side effects: a function of its operands."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return not written(node) and torch.Tag.nondeterministic_seeded not in node.target.tags


@cache
def keeps_order(target: Any) -> bool:
    """Whether each result of `target` is in new memory, and contiguous for contiguous operands.

    Others, such as attention, may lay out results in another order.
    """
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable or _is_view(target):
        return False
    composed = has_kernel(target.name(), "CompositeImplicitAutograd")  # it may return an operand
    return (is_pointwise(target) and not composed) or target in _IN_ORDER


def is_pointwise(target: Any) -> bool:
    """Whether `target` is an element-by-element op."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def is_overwritten(node: fx.Node) -> bool:
    """Whether a user of `node` overwrites it, directly or through a view."""
    seen = [user for user in node.users if aliased(user) is node]
    return any(node in written(user) for user in node.users) or any(map(is_overwritten, seen))


def _part_of_several(node: fx.Node) -> fx.Node | None:
    several: Any = node.args[0]
    if several.target is collectives.together_:
        kind, xs = several.args[:2]
        return None if kind == "reduce_scatter" else xs[node.args[1]]  # type: ignore[index]
    if hasattr(several.target, "written"):
        return written(several)[node.args[1]]  # type: ignore[index]
    return aliased(several)


@cache
def _is_view(target: Any) -> bool:
    if target in (collectives.partialize, collectives.part, aten.reshape.default):
        return True
    if not isinstance(target, OpOverload):
        return False
    return any(r.alias_info is not None for r in schema_of(target).returns)
