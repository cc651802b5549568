"""The order of matmuls of one value: those of a weight first.

    dw = dy.T @ x; dx = dy @ w    ->    dx = dy @ w; dw = dy.T @ x

Beside split tokens both need `dy` whole. A matmul with a placed weight gathers it in any case, and the other
one then reads the gathered value. Without that, the gradient of the weight, which comes first in layers
without biases, may move `x` and sum its result in place of a gather of `dy`.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx

from tutti.graph.analysis.aliases import viewed
from tutti.graph.analysis.order import ancestors

aten = torch.ops.aten
_MATMULS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear})


def weights_first(graph: fx.Graph, parameters: Container[fx.Node]) -> None:
    """Move each matmul of a parameter before those of the same value and region without parameters."""
    first: dict[tuple[fx.Node, object], fx.Node] = {}
    for node in list(graph.nodes):
        if not is_matmul(node):
            continue
        bases = [_base(x) for x in node.all_input_nodes]
        keys = [(x, node.meta.get("region")) for x in bases if x not in parameters]
        if len(keys) == len(bases):
            for key in keys:
                first.setdefault(key, node)
            continue
        before = [first[key] for key in keys if key in first]
        if before:
            _move(node, min(before))


def is_matmul(node: fx.Node) -> bool:
    """Whether it multiplies matrices."""
    return getattr(node.target, "overloadpacket", None) in _MATMULS


def _move(node: fx.Node, before: fx.Node) -> None:
    """Move `node`, and the views and casts that it reads, unless it needs another op after `before`."""
    later = ancestors([node], lambda x: x is before or x > before)
    if all(x is node or _source(x) is not None for x in later) and before not in later:
        for x in sorted(later):
            before.prepend(x)


def _base(x: fx.Node) -> fx.Node:
    while (source := _source(x)) is not None:
        x = source
    return x


def _source(x: fx.Node) -> fx.Node | None:
    """Of a view or a cast."""
    if x.target is aten._to_copy.default:
        return x.all_input_nodes[0]
    return viewed(x)
