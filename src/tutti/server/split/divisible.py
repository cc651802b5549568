"""Finds elementwise updates, whose variables may be cut anywhere."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.ops.fused_updates import BY_OP
from tutti.rules.families.pointwise import is_pointwise
from tutti.server.split.piece import GraphPiece

aten = torch.ops.aten
# Ops that make a tensor like another, of any shape.
_LIKE = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)


def is_divisible(piece: GraphPiece, whole: tuple[int, ...]) -> bool:
    """Whether each number of the variable depends only on numbers at the same index."""
    sums = set(piece.graph.output_node().all_input_nodes)
    for node in piece.graph.nodes:
        val = node.meta.get("val")
        if node.op == "output" or not isinstance(val, Tensor | list | tuple):
            continue
        if node.op == "placeholder":
            alone = tuple(val.shape) == whole or val.numel() == 1  # type: ignore[union-attr]
        elif node.op == "get_attr":
            alone = isinstance(val, Tensor) and val.numel() == 1
        else:
            alone = _is_alone(node, whole) or (node in sums and node.target is aten.sum.default)
        if not alone:
            return False
    return True


def _is_alone(node: fx.Node, whole: tuple[int, ...]) -> bool:
    val = node.meta["val"]
    if not isinstance(val, Tensor):
        return node.target in BY_OP
    if val.numel() == 1:
        inputs = [x.meta["val"] for x in node.all_input_nodes]
        return all(x.numel() == 1 for x in inputs if isinstance(x, Tensor))
    parent: Any = node.args[0]
    taken = node.target is operator.getitem and parent.target in BY_OP
    alone = taken or is_pointwise(node.target) or node.target in _LIKE
    return alone and tuple(val.shape) == whole
