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
    """Give each part of `body` that sums a second graph, for later micro-batches."""
    ops = {s.name: s.op for s in body.sums}
    if body.num_micro == 1:
        return body
    return body.with_parts(lambda part: _with_adding(part, ops))


def _with_adding(part: LoopPart, ops: dict[str, str]) -> LoopPart:
    """The part with its sums first in `summed`; joins and maxima follow."""
    count = next((i for i, n in enumerate(part.summed) if ops[n] != "sum"), len(part.summed))
    if not count:
        return part
    graph = fx.Graph()
    graph.output(graph.graph_copy(part.graph, {}))
    output = graph.output_node()
    both: Any = output.args[0]
    outputs, summed = both
    output.args = ((outputs, summed[count:]),)
    totals = _placeholders(graph, part.summed[:count], summed)
    for total, made in zip(totals, summed[:count], strict=True):
        _add_to(graph, total, _uncopied(made))
    graph.lint()
    return replace(part, adding=graph, num_added=count)


def _placeholders(graph: fx.Graph, names: tuple[str, ...], like: list[fx.Node]) -> list[fx.Node]:
    first = next(n for n in graph.nodes if n.op != "placeholder")
    found = []
    for name, made in zip(names, like, strict=False):
        with graph.inserting_before(first):
            total = graph.placeholder(f"total_{name}")
        total.meta = {k: made.meta[k] for k in ("val", "sharding") if k in made.meta}
        found.append(total)
    return found


def _uncopied(made: fx.Node) -> fx.Node:
    """The operand of a copy or a cast whose only purpose is a total of its own, else `made`."""
    copies = made.target is aten.clone.default or _widens(made)
    if not copies or made.users:
        return made
    source: Any = made.args[0]
    made.graph.erase_node(made)
    return source


def _widens(made: fx.Node) -> bool:
    """Whether `made` casts to a wider dtype on a GPU: there the sum reads the narrow value, with the same
    bits and two fifths less memory traffic. On a processor the sum would make that cast by itself."""
    if made.target is not aten._to_copy.default:
        return False
    x, val = made.args[0].meta["val"], made.meta["val"]  # type: ignore[union-attr]
    floats = x.is_floating_point() and val.is_floating_point()
    wider = torch.promote_types(x.dtype, val.dtype) == val.dtype
    return bool(floats and wider and x.device == val.device and kind_of(x) == "cuda")


def _add_to(graph: fx.Graph, total: fx.Node, made: fx.Node) -> None:
    """Add `made` to `total` at once; with its own op, if nothing else reads it."""
    fused = None
    one_dtype = made.meta["val"].dtype == total.meta["val"].dtype
    if not made.users and one_dtype and made.target in _FUSED:
        with graph.inserting_before(made):
            fused = _FUSED[made.target](made)
    target, args = fused or (aten.add_.Tensor, (made,))
    with graph.inserting_after(made):
        added = graph.call_function(target, (total, *args))
    added.meta = {k: total.meta[k] for k in ("val", "sharding") if k in total.meta}
    added.meta |= {k: made.meta[k] for k in NOTES if k in made.meta}
    if fused:
        graph.erase_node(made)


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
