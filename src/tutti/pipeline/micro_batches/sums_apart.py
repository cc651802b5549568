"""Sums over samples of values to which the step adds a number: the number joins the sum afterwards.

    sum(-(x + m) / c)  ->  sum(-x / c) + n * (-m / c)        for a number m, n values of x to a sum

In `(log_p + log_det.mean()).mean()` the number is a mean of the batch, and a micro-batch would need it.
After the rewrite only the sum does. The ops between are linear, and nothing else reads their values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.capture.captured import Captured, copied
from tutti.graph.edits.edit import Editor, value_of

aten = torch.ops.aten
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_SCALES = (
    aten.neg.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
)


def sums_apart(captured: Captured) -> Captured:
    """The same step with numbers added to sums, instead of to each of the values."""
    if not any(_parts(n) for n in captured.graph.nodes):
        return captured
    made = copied(captured)
    editor = Editor(made.graph, made.mode)
    for node in list(made.graph.nodes):
        total: fx.Node | None = node
        while total is not None:  # once for each number
            total = _apart(editor, total)
    made.graph.lint()
    return made


def _parts(total: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The sum of values and a number that `total` adds up, and the scalings between; None without one."""
    if total.target is not aten.sum.dim_IntList or not total.meta["val"].numel():
        return None
    x: Any = total.args[0]
    scalings: list[fx.Node] = []
    while x.target in _SCALES and _reads_one(x):
        scalings.insert(0, x)
        x = x.args[0]
    alone = all(len(n.users) == 1 for n in (x, *scalings))
    added = x.target in _SUMS and not x.kwargs and len(x.all_input_nodes) == 2
    if not (alone and added):
        return None
    operands = [value_of(a) for a in x.args]
    alike = len({v.dtype for v in (x.meta["val"], *operands, total.meta["val"])}) == 1
    fits = any(v.shape == x.meta["val"].shape for v in operands)
    one_number = [v.dim() == 0 for v in operands].count(True) == 1
    return (x, scalings) if alike and fits and one_number else None


def _reads_one(node: fx.Node) -> bool:
    """Whether a node scales its first operand by plain numbers."""
    return not node.kwargs and not any(isinstance(x, fx.Node) for x in node.args[1:])


def _apart(editor: Editor, total: fx.Node) -> fx.Node | None:
    """Rewrite `total`; the sum of the values alone, or None if there is nothing to do."""
    found = _parts(total)
    if found is None:
        return None
    added, scalings = found
    emit = editor.at(total)

    def scaled(x: Any) -> fx.Node:
        for node in scalings:
            x = emit(node.target, x, *node.args[1:])
        return x

    count = added.meta["val"].numel() // total.meta["val"].numel()
    operands: Any = added.args
    sums = [
        emit(aten.mul.Tensor, scaled(x), count)
        if value_of(x).dim() == 0
        else emit(aten.sum.dim_IntList, scaled(x), *total.args[1:], **total.kwargs)
        for x in operands
    ]
    editor.replace(total, emit(added.target, *sums))
    for node in (*reversed(scalings), added):
        editor.graph.erase_node(node)
    return next(x for x in sums if x.target is aten.sum.dim_IntList)
