"""`linear`: joins a matmul with a transposed weight, and the reshapes around it, into one call.

    %5 = reshape(%x, [1024, 256])           %5 = reshape(%x, [1024, 256])       if the backward needs it
    %6 = permute(%w, [1, 0])
    %7 = addmm(%b, %5, %6)             ->   %8 = linear(%x, %w, %b)
    %8 = reshape(%7, [8, 128, 512])

Capture decomposes `linear`, so that rules need only matmuls. PyTorch's call does the work of those on the
left in one: each call from Python costs some 10 us after a matmul that fills the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.graph.edits.edit import NOTES, value_of

aten = torch.ops.aten
_TRANSPOSED = [1, 0]
_MATMULS: dict[Any, Any] = {
    aten.mm.default: aten.linear.default,
    aten.addmm.default: aten.linear.default,
    aten.mm.out: aten.linear.out,
    aten.addmm.out: aten.linear.out,
}


def linear(graph: fx.Graph) -> int:
    """Rewrite `graph`; returns the number of matmuls turned into `linear`."""
    count = 0
    for node in list(graph.nodes):
        given = _operands(node)
        if given is not None:
            _rewrite(graph, node, *given)
            count += 1
    return count


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """The operands of the matmul `node`: 2-D rows, weight, bias; None for another op."""
    if node.target not in _MATMULS or set(node.kwargs) - {"out"}:
        return None
    *bias, rows, turned = node.args
    if not isinstance(turned, fx.Node) or turned.target is not aten.permute.default:
        return None
    weight, dims = turned.args
    plain = list(dims) == _TRANSPOSED and all(b.meta["val"].dim() == 1 for b in bias)  # type: ignore[arg-type, union-attr]
    return (rows, weight, bias[0] if bias else None) if plain else None  # type: ignore[return-value]


def _rewrite(
    graph: fx.Graph, node: fx.Node, rows: fx.Node, weight: fx.Node, bias: fx.Node | None
) -> None:
    turned: Any = node.args[-1]
    x, result = (rows, node) if node.kwargs else _around(node, rows)
    with graph.inserting_before(node):
        operands = (x, weight, *([bias] if bias else []))
        made = graph.call_function(_MATMULS[node.target], operands, dict(node.kwargs))
    made.meta = {k: result.meta[k] for k in (*NOTES, "val", "sharding") if k in result.meta}
    result.replace_all_uses_with(made)
    for dead in dict.fromkeys((result, node, turned, rows)):
        if not dead.users and dead.op == "call_function":
            graph.erase_node(dead)


def _around(node: fx.Node, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The value before the reshape to `rows`, and the reshape of `node`, if their shapes match."""
    if rows.target is not aten.reshape.default or len(node.users) != 1:
        return rows, node
    (result,) = node.users
    x: Any = rows.args[0]
    if result.target is not aten.reshape.default:
        return rows, node
    given, made, matmul = value_of(x), value_of(result), value_of(node)
    same = given.is_contiguous() and made.shape == (*given.shape[:-1], matmul.shape[-1])
    fits = given.dim() > 1 and given.shape[-1] == value_of(rows).shape[-1]
    return (x, result) if same and fits else (rows, node)
