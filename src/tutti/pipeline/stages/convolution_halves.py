"""The backward of a convolution in two: the gradient of its input, and those of its weight and bias.

    %3 = convolution_backward(%g, %x, %w, ..., [True, True, True])

    %3 = convolution_backward(%g, %x, %w, ..., [True, False, False])        I
    %4 = convolution_backward(%g, %x, %w, ..., [False, True, True])         W

One call computes them one after the other, so two take no longer. As one, all of it would be in I: other
stages would wait for gradients of weights, and W would have nothing to fill idle time with.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tutti.graph.edits.edit import Editor, Emit

aten = torch.ops.aten


def convolutions_in_halves(graph: fx.Graph) -> None:
    """Rewrite `graph` in place."""
    editor = Editor(graph)
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        given: Any = node.args
        *operands, mask = given
        if mask[0] and any(mask[1:]):
            emit = editor.at(node)
            inputs = _results(emit, operands, [True, False, False])
            weights = _results(emit, operands, [False, *mask[1:]])
            editor.replace(node, [*inputs[:1], *weights[1:]])


def _results(emit: Emit, operands: list[Any], mask: list[bool]) -> list[fx.Node | None]:
    both = emit(aten.convolution_backward.default, *operands, mask)
    return [emit(operator.getitem, both, i) if needed else None for i, needed in enumerate(mask)]
