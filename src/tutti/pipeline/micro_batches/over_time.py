"""Collectives over the axis `micro`, for a rank that runs it in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from tutti.graph.ops import collectives
from tutti.graph.text import op_name
from tutti.layout import Layout

MICRO = "micro"


def sums_over_time(node: fx.Node) -> bool:
    """Whether `node` is a sum or a join over the micro-batches."""
    moves = (collectives.all_reduce, collectives.all_gather)
    return node.target in moves and collectives.axes_of(node) == (MICRO,)


def take_apart(node: fx.Node, layout: Layout) -> None:
    """Split a collective over `micro` into a sum, a join or a part over `micro` alone, and the rest.

    all_reduce(x, data+micro)     ->  all_reduce(all_reduce(x, micro), data)
    all_gather(x, data+micro)     ->  all_gather(all_gather(x, micro), data)        minor axes first
    reduce_scatter(x, micro)      ->  shard(all_reduce(x, micro), micro)
    all_to_all(x, micro)          ->  shard(all_gather(x, micro), micro)
    """
    axes: Any = collectives.axes_of(node) if node.target in collectives.COLLECTIVES else ()
    if MICRO not in axes or sums_over_time(node):
        return
    given: Any = node.args
    x, _, *rest = given
    graph, at = node.graph, axes.index(MICRO)
    with graph.inserting_before(node):
        if node.target is collectives.all_reduce:
            for some in ((MICRO,), axes[:at] + axes[at + 1 :]):
                x = _moved(node, collectives.all_reduce, x, some, *rest)
        elif node.target is collectives.all_gather:
            for some in filter(None, (axes[at + 1 :], (MICRO,), axes[:at])):
                x = _joined(node, x, some, *rest, layout=layout)
        else:
            assert axes == (MICRO,), f"{op_name(node)} over {axes}"
            if node.target is collectives.reduce_scatter:
                whole = _moved(node, collectives.all_reduce, x, axes, rest[2])
                whole.meta["val"] = x.meta["val"]
            else:
                whole = _joined(node, x, axes, *rest[2:], layout=layout)
            x = _moved(node, collectives.shard, whole, axes, *rest[:2])
    node.replace_all_uses_with(x)
    graph.erase_node(node)


def _moved(
    node: fx.Node, target: Callable[..., Any], x: fx.Node, axes: tuple[str, ...], *rest: Any
) -> fx.Node:
    """A collective in place of `node`, or a step on the way there."""
    made = node.graph.call_function(target, (x, axes, *rest))
    made.meta = dict(node.meta)
    return made


def _joined(
    node: fx.Node, x: fx.Node, axes: tuple[str, ...], dim: int, outer: int, *, layout: Layout
) -> fx.Node:
    """`x` gathered over `axes`, in place of `node` or on the way there."""
    made = _moved(node, collectives.all_gather, x, axes, dim, outer)
    val: Tensor = x.meta["val"]
    shape = list(val.shape)
    shape[dim] *= layout.program_mesh.size(axes)
    made.meta["val"] = val.new_empty(shape)
    return made
