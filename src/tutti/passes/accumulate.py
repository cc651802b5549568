"""`accumulate`: the op that makes a term of a sum over micro-batches adds it to the total.

    first micro-batch     %7 = mm(%g, %x)                    -> the total
    every later one       %7 = addmm_(%total, %g, %x)        instead of a matmul, and a sum after it

The program then writes a gradient once, reads it once, and never holds it beside its total.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tutti.graph.analysis.cost import kind_of
from tutti.graph.edits.edit import NOTES
from tutti.graph.ops.loop import Body, LoopPart

aten = torch.ops.aten
# An op, and its arguments after the total.
Call = tuple[Any, tuple[Any, ...]]


def accumulate(body: Body) -> Body:
    """Give each part of `body` that sums a second graph, for later micro-batches; parts for the last one add
    already, and now with the ops that make the terms."""
    if body.num_micro == 1:
        return body
    for part in body.last.values():
        totals = {n for n in part.graph.nodes if n.op == "placeholder"}
        for node in list(part.graph.nodes):
            if node.target is aten.add_.Tensor and node.args[0] in totals:
                _fuse(node)
    return body.with_parts(lambda part: _with_adding(part, len(body.sums_of(part))))


def _with_adding(part: LoopPart, count: int) -> LoopPart:
    """The part with a graph that adds to the first `count` totals."""
    if not count:
        return part
    graph = fx.Graph()
    graph.output(graph.graph_copy(part.graph, {}))
    output = graph.output_node()
    both: Any = output.args[0]
    outputs, summed = both
    output.args = ((outputs, summed[count:]),)
    for name, made in zip(part.summed[:count], summed, strict=False):
        _fuse(added_to(total_like(graph, name, made), made))
    graph.lint()
    return replace(part, adding=graph, num_added=count)


def total_like(graph: fx.Graph, name: str, made: fx.Node) -> fx.Node:
    """A new last input of a part: the total `name` of values like `made`."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        total = graph.placeholder(f"total_{name}")
    total.meta = {k: made.meta[k] for k in ("val", "sharding") if k in made.meta}
    return total


def added_to(total: fx.Node, made: fx.Node) -> fx.Node:
    """The sum of both, in the memory of `total`, as soon as `made` is there."""
    with made.graph.inserting_after(made):
        added = made.graph.call_function(aten.add_.Tensor, (total, made))
    added.meta = total.meta | {k: made.meta[k] for k in NOTES if k in made.meta}
    return added


def _widens(made: fx.Node) -> bool:
    """Whether `made` casts to a wider dtype on a GPU: there the sum reads the narrow value, with the same
    bits and two fifths less memory traffic. On a processor the sum would make that cast by itself."""
    if made.target is not aten._to_copy.default:
        return False
    x, val = made.args[0].meta["val"], made.meta["val"]  # type: ignore[union-attr]
    floats = x.is_floating_point() and val.is_floating_point()
    wider = torch.promote_types(x.dtype, val.dtype) == val.dtype
    return bool(floats and wider and x.device == val.device and kind_of(x) == "cuda")


def _fuse(added: fx.Node) -> None:
    """Let the op that makes the second operand of a sum add it to the first one, if nothing else reads it."""
    total, made = _operands(added)
    if len(made.users) > 1 or made.target not in _FUSED:
        return
    if made.meta["val"].dtype != total.meta["val"].dtype:
        return
    with added.graph.inserting_before(made):
        fused = _FUSED[made.target](made)
    if fused is None:
        return
    added.target, added.args = fused[0], (total, *fused[1])
    made.append(added)
    added.graph.erase_node(made)


def _operands(added: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The total and the term of a sum, without a copy or a cast of the term for the sum alone."""
    total, made = added.all_input_nodes
    copies = made.target is aten.clone.default or _widens(made)
    if not copies or len(made.users) > 1:
        return total, made
    source: Any = made.args[0]
    added.replace_input_with(made, source)
    if source.op == "call_function":
        source.append(added)
    added.graph.erase_node(made)
    return total, source


def _rows(node: fx.Node) -> Call | None:
    """The gradient of an embedding: adds to the rows read, without a write of the whole table."""
    grad, index, _, padding, scaled = node.args
    x = grad.meta["val"]  # type: ignore[union-attr]
    if padding != -1 or scaled or kind_of(x) != "cpu":  # on a GPU the order of sums would vary
        return None
    rows = []
    for one, shape in ((index, [-1]), (grad, [-1, x.shape[-1]])):
        row = node.graph.call_function(aten.reshape.default, (one, shape))
        row.meta = {**node.meta, "val": one.meta["val"].reshape(shape)}  # type: ignore[union-attr]
        rows.append(row)
    return aten.index_add_.default, (0, *rows)


# The call by which an op adds its result to a total; None without one.
_FUSED: dict[Any, Callable[[fx.Node], Call | None]] = {
    aten.embedding_dense_backward.default: _rows,
    aten.mm.default: lambda node: (aten.addmm_.default, node.args),
    aten.bmm.default: lambda node: (aten.baddbmm_.default, node.args),
}
