"""`simplify`: removes arithmetic without effect, and arithmetic on repeated values.

    %6 = pow(%5, 1.0)                                  (%5 is used for both)
    %7 = mul(%5, 1.0)

    %6 = slice_backward(%a, [2, 64], 1, 0, 32)
    %7 = slice_backward(%b, [2, 64], 1, 32, 64)   ->   %8 = cat([%a, %b], 1)
    %8 = add(%6, %7)

    %6 = expand(%5, [256, 512])                        %6 = div(%5, 512)
    %7 = div(%6, 512)                                  %7 = expand(%6, [256, 512])
    %8 = mul(%7, %x)                                   %8 = mul(%7, %x)

The first come from derivatives (that of x**2 is 2 * x**1) and from factors of one. The second comes from a
value that the forward splits into halves, as rotary embeddings do: each half's gradient is padded with zeros,
and the sum of both is their concatenation, also with a third term. The third is the derivative of a mean. The
values stay the same, except for the sign of a zero. It runs before any in-place op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tutti.graph.analysis.aliases import is_pointwise
from tutti.graph.edits.edit import Editor, value_of
from tutti.passes.own_results import is_returned

aten = torch.ops.aten
_VIEWS = frozenset({aten.reshape.default, aten.permute.default, aten.unsqueeze.default})
# Ops that may serve only a removed op.
_WITHOUT = _VIEWS | {aten.slice_backward.default, aten.expand.default, aten.add.Tensor}


def simplify(graph: fx.Graph) -> int:
    """Rewrite `graph`; returns the number of nodes rewritten."""
    count = 0
    for node in list(graph.nodes):
        for change in _CHANGES.get(node.target, ()):
            made = change(graph, node)
            if made is not None:
                node.replace_all_uses_with(made)
                _erase(graph, node)
                count += 1
                break
    return count


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase `node`, and its operands in `_WITHOUT` that have no other users."""
    operands = node.all_input_nodes
    graph.erase_node(node)
    for x in operands:
        if not x.users and x.target in _WITHOUT:
            _erase(graph, x)


def _operand(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The operand of an op by the number one, if the result equals it."""
    x, number = (*node.args, None)[:2]
    if isinstance(number, bool) or number != 1 or not isinstance(x, fx.Node) or node.kwargs:
        return None
    # A result, or new state, is a value of its own.
    return x if _form(x) == _form(node) and not is_returned(node) else None


def _form(x: fx.Node) -> tuple[Any, ...]:
    value = value_of(x)
    return value.dtype, value.shape, value.stride(), value.device


def _side_by_side(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A sum of the gradients of two slices that together cover a dim, as their concatenation.

    It may have a third term: at each position only one of the two adds a non-zero to it.
    """
    emit = Editor(graph).at(node)
    for x, y in _both_ways(node):
        if (pair := _pair(x, y)) is not None:
            return _noted(emit(aten.cat.default, *pair), node)
        for z, rest in _both_ways(y) if len(y.users) == 1 else ():
            if (pair := _pair(x, z)) is not None:
                return _noted(emit(aten.add.Tensor, rest, emit(aten.cat.default, *pair)), node)
    return None


def _both_ways(node: fx.Node) -> list[Any]:
    """The two values that a sum adds, in either order; nothing for other nodes."""
    plain = node.target is aten.add.Tensor and not node.kwargs
    is_sum = plain and all(isinstance(x, fx.Node) for x in node.args)
    return [node.args, node.args[::-1]] if is_sum else []


def _pair(x: fx.Node, y: fx.Node) -> tuple[list[fx.Node], int] | None:
    """The operands and the dim of the concatenation, for the gradients of two slices that cover the dim."""
    if not all(_is_slice(n) and len(n.users) == 1 for n in (x, y)):
        return None
    first, second = sorted((x, y), key=_begin)
    sizes: Any = first.args[1]
    dim = _dim(first)
    if list(sizes) != list(second.args[1]) or dim != _dim(second) or _begin(first) != 0:  # type: ignore[arg-type]
        return None
    if value_of(first).dtype != value_of(second).dtype:
        return None
    ends = [_begin(n) + value_of(n.args[0]).shape[dim] for n in (first, second)]
    if _begin(second) != ends[0] or ends[1] != sizes[dim]:
        return None
    return [n.args[0] for n in (first, second)], dim  # type: ignore[return-value]


def _is_slice(x: Any) -> bool:
    if not isinstance(x, fx.Node) or x.target is not aten.slice_backward.default:
        return False
    step: Any = x.args[5]
    return step == 1


def _dim(x: fx.Node) -> int:
    _, sizes, dim, *_ = x.args
    return dim % len(sizes)  # type: ignore[operator, arg-type, return-value]


def _begin(x: fx.Node) -> int:
    """The start of a slice, counted from the first element."""
    _, sizes, _, start, *_ = x.args
    return slice(start, None).indices(sizes[_dim(x)])[0]  # type: ignore[index, arg-type]


def _expanded_later(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Move an element-by-element op with a number before the expand of its operand."""
    given, number = (*node.args, None)[:2]
    readers_fit = all(is_pointwise(user.target) for user in node.users)
    if not isinstance(number, int | float) or node.kwargs or not readers_fit:
        return None
    x: Any = given
    views = []
    while x.target in _VIEWS:
        views.append(x)
        x = x.args[0]
    if x.target is not aten.expand.default:
        return None
    small = x.args[0]
    repeats = 0 in value_of(given).stride()
    if not repeats or 2 * value_of(small).numel() > value_of(node).numel():
        return None
    emit = Editor(graph).at(node)
    made = emit(node.target, small, number)
    for view in (x, *reversed(views)):
        made = emit(view.target, made, *view.args[1:])
    return _noted(made, node)


def _noted(made: fx.Node, node: fx.Node) -> fx.Node:
    if "sharding" in node.meta:
        made.meta["sharding"] = node.meta["sharding"]
    return made


_SCALED = (_operand, _expanded_later)
_CHANGES: dict[Any, tuple[Callable[[fx.Graph, fx.Node], fx.Node | None], ...]] = {
    aten.pow.Tensor_Scalar: _SCALED,
    aten.mul.Tensor: _SCALED,
    aten.mul.Scalar: _SCALED,
    aten.div.Tensor: _SCALED,
    aten.div.Scalar: _SCALED,
    aten.add.Tensor: (_side_by_side,),
}
