"""`attention_memory`: the result of memory-efficient attention lies in memory as its backward reads it.

    backward(grad, q, k, v, bias, %out, ...)   ->   %1 = transpose(%out, 1, 2)
                                                    %2 = contiguous(%1)
                                                    %3 = transpose(%2, 1, 2)
                                                    backward(grad, q, k, v, bias, %3, ...)

The kernel of a GPU takes the strides of all its operands but this one: it reads [batch, queries, heads, dim]
in one piece, as its forward has written it, and elsewhere finds other numbers in silence. A result that has
been gathered, split or sent lies otherwise. Where it lies right, nothing is copied. The pass cannot be left
out.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from tutti.graph.edits.edit import Editor

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_efficient_attention.default
BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
_OUT = 5  # the position of the forward's result among the operands


def attention_memory(graph: fx.Graph) -> int:
    """Lay out results that do not come from the forward itself; returns their number."""
    count, editor = 0, Editor(graph)
    for node in list(graph.find_nodes(op="call_function", target=BACKWARD)):
        out: fx.Node = node.args[_OUT]  # type: ignore[assignment]
        if _is_of_forward(out):
            continue
        emit = editor.at(node)
        by_query = emit(aten.transpose.int, out, 1, 2)
        whole = emit(aten.contiguous.default, by_query)
        node.update_arg(_OUT, emit(aten.transpose.int, whole, 1, 2))
        count += 1
    return count


def _is_of_forward(out: fx.Node) -> bool:
    return out.target is operator.getitem and out.args[0].target is FORWARD  # type: ignore[union-attr]
