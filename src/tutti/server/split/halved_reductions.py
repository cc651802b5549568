"""Reductions of a whole gradient to one number, in two halves: a sum over blocks, and the rest.

    norm(g)  =  sqrt(sum of g^2)          blocks give sums of squares, which add up; then the root

`FIRST` and `FINISH` of an op are its halves; an op without such a form (a maximum) needs the whole gradient.
The number is real: a sum of complex numbers is no such reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.edits.edit import squares
from tutti.server.split.piece import emitted

aten = torch.ops.aten
Halves = tuple[
    Callable[[fx.Graph, fx.Node], fx.Node],  # the whole or a block -> its summand, float64
    Callable[[fx.Graph, fx.Node], fx.Node],  # the sum, float64 -> the value, before its dtype
]


@dataclass(frozen=True)
class Reduction:
    """The two halves of a node that reduces all of its operand.

    `additive`: `first` of the blocks adds up to `first` of the whole.
    """

    operand: fx.Node
    additive: bool
    first: Callable[[fx.Graph, fx.Node], fx.Node]
    finish: Callable[[fx.Graph, fx.Node], fx.Node]

    def adapt(self, graph: fx.Graph, total: fx.Node, node: fx.Node) -> fx.Node:
        """The value of `node` from the sum over blocks."""
        val: Tensor = node.meta["val"]
        total.meta["val"] = val.new_empty((), dtype=torch.float64)
        made = emitted(graph, aten._to_copy.default, self.finish(graph, total), dtype=val.dtype)
        return emitted(graph, aten.reshape.default, made, list(val.shape)) if val.ndim else made


def reduction_of(node: fx.Node) -> Reduction | None:
    """The reduction by which `node` makes one number of all of one tensor; None if it does not."""
    make = _TABLE.get(node.target)
    val = node.meta.get("val")
    if make is None or not isinstance(val, Tensor) or val.numel() != 1 or val.is_complex():
        return None
    operand: Any = node.args[0]
    halves = make(node)
    if halves is None:
        return Reduction(operand, False, lambda g, x: _whole(g, x, node), _as_it_is)
    return Reduction(operand, True, *halves)


def _sum(_node: fx.Node) -> Halves:
    return _summed, _as_it_is


def _norm(node: fx.Node) -> Halves | None:
    order: Any = node.args[1] if len(node.args) > 1 else 2
    if not 0 < order < math.inf:
        return None
    if order == 2:
        return lambda g, x: _summed(g, squares(partial(emitted, g), x)), _root
    return (
        lambda g, x: _summed(
            g, emitted(g, aten.pow.Tensor_Scalar, emitted(g, aten.abs.default, x), order)
        ),
        lambda g, x: emitted(g, aten.pow.Tensor_Scalar, x, 1 / order),
    )


def _any(_node: fx.Node) -> Halves:
    return (
        lambda g, x: _summed(g, emitted(g, aten.ne.Scalar, x, 0)),
        lambda g, x: emitted(g, aten.gt.Scalar, x, 0),
    )


def _all(_node: fx.Node) -> Halves:
    return (
        lambda g, x: _summed(g, emitted(g, aten.eq.Scalar, x, 0)),
        lambda g, x: emitted(g, aten.eq.Scalar, x, 0),
    )


def _not_additive(_node: fx.Node) -> None:
    return None


def _summed(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return emitted(graph, aten.sum.default, x, dtype=torch.float64)


def _root(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return emitted(graph, aten.sqrt.default, x)


def _as_it_is(_graph: fx.Graph, x: fx.Node) -> fx.Node:
    return x


def _whole(graph: fx.Graph, x: fx.Node, node: fx.Node) -> fx.Node:
    """The op itself on the whole operand, as float64."""
    made = emitted(graph, node.target, x, *node.args[1:], **node.kwargs)
    return emitted(
        graph,
        aten.reshape.default,
        emitted(graph, aten._to_copy.default, made, dtype=torch.float64),
        [],
    )


_TABLE: dict[Any, Callable[[fx.Node], Halves | None]] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.linalg_vector_norm.default: _norm,
    aten.any.default: _any,
    aten.all.default: _all,
    **dict.fromkeys(
        (aten.max.default, aten.min.default, aten.amax.default, aten.amin.default), _not_additive
    ),
}
