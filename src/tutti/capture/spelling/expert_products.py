"""Matmuls of rows with weights picked by an index, as products by expert: no row has a copy of its weights.

    index(W, [e])            (S, N, K)   \\
    bmm(that, x)             (S, N, 1)   /   expert_mm(x, W, e)
    bmm(a, b)                (S, N, K)   \\
    index_put(0, [e], that)  (E, N, K)   /   expert_outer(a, b, e)

The second form is the gradient of the first with respect to W. A cast of the picked weights (autocast)
becomes one of W, and a cast of the outer products one of their sum, as of any weight. An index below 0 counts
from the end in PyTorch, and is no expert in `expert_mm`: it is counted from the start first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.spelling.rewrites import VIEWS
from tutti.graph.analysis.lookup import IndexLookup
from tutti.graph.edits.edit import Editor, Emit, shaped
from tutti.graph.ops.expert_rows import expert_mm, expert_outer

aten = torch.ops.aten
_SWAPPED = [0, 2, 1]


def take_products_by_expert(editor: Editor) -> int:
    """Rewrite every such matmul of a canonical graph; the number of them."""
    experts: dict[fx.Node, fx.Node] = {}
    count = 0
    for node in list(editor.graph.nodes):
        emit = editor.at(node)
        if node.target is aten.bmm.default:
            new = _product(emit, node, experts)
        elif node.target is aten.index_put.default:
            new = _gradient(emit, node, experts)
        else:
            continue
        if new is not None:
            editor.replace(node, new)
            count += 1
    if count:
        _join_views(editor)
    return count


def _product(emit: Emit, node: fx.Node, experts: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """A bmm of picked weights and one row each."""
    left, right = node.all_input_nodes[:2] if len(node.all_input_nodes) == 2 else (None, None)
    if left is None or right is None:
        return None
    for picked, row, is_left in ((left, right, True), (right, left, False)):
        base, is_swapped = peeled(picked)
        lookup = _row_lookup(base)
        length = _shape(row)[2 if is_left else 1]
        if lookup is None or length != 1 or not _is_weight(base.args[0]):
            continue
        weight: Any = base.args[0]
        rows = _flat(emit, row, [_shape(row)[0], -1])
        # weights (N, K) times a column (K, 1), or a row (1, K) times weights (K, N)
        transposed = is_swapped == is_left
        of = _experts(emit, lookup, experts)
        weight = cast_like(emit, weight, picked)
        made = emit(expert_mm, rows, weight, of, transposed, 1, 1)
        return shaped(emit, made, _shape(node))
    return None


def _gradient(emit: Emit, node: fx.Node, experts: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Outer products of rows, added up by expert."""
    given: Any = node.args
    base, _, values = given[:3]
    zeros = base.target is aten.full.default and base.args[1] == 0
    if not zeros or len(given) < 4 or not given[3]:
        return None
    product, is_swapped = peeled(values)
    lookup = _row_lookup(node)
    if lookup is None or product.target is not aten.bmm.default:
        return None
    if lookup.indices[0] not in experts:
        return None  # not the gradient of a product by expert
    operands: Any = product.args
    left, right = operands
    if _shape(left)[2] != 1:
        return None
    num_rows = _shape(left)[0]
    a, b = (_flat(emit, x, [num_rows, -1]) for x in (left, right))
    a, b = (b, a) if is_swapped else (a, b)
    of = _experts(emit, lookup, experts)
    return cast_like(emit, emit(expert_outer, a, b, of, _shape(node), 1, 1), node)


def _is_weight(x: Any) -> bool:
    """Whether `x` is a parameter, or a view of one: it has few experts for many rows, unlike activations."""
    while x.op == "call_function" and (x.target in VIEWS or x.target is aten._to_copy.default):
        x = x.args[0]
    return x.meta.get("kind") == "parameter"


def _row_lookup(node: fx.Node) -> IndexLookup | None:
    """The lookup of a node, if a list of numbers alone indexes dim 0 of a floating tensor of three dims."""
    if node.target not in (aten.index.Tensor, aten.index_put.default):
        return None
    base: Any = node.args[0]
    val: Tensor = base.meta["val"]
    lookup = IndexLookup.of(node)
    if lookup is None or val.ndim != 3 or not val.is_floating_point():
        return None
    return lookup if lookup.used == [0] and len(lookup.common) == 1 else None


def _experts(emit: Emit, lookup: IndexLookup, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """The index, counted from the start; all products of one index share it."""
    index: Any = lookup.indices[0]
    if index not in known:
        known[index] = lookup.line(emit, [0])
    return known[index]


def peeled(x: fx.Node) -> tuple[fx.Node, bool]:
    """The value below casts, and transposes of the last two dims; and whether these transpose."""
    is_swapped = False
    while True:
        base: Any = x.args[0] if x.args else None
        if x.target is aten.permute.default and x.args[1] == _SWAPPED:
            is_swapped = not is_swapped
        elif x.target is not aten._to_copy.default or not _floats(x, base):
            return x, is_swapped
        x = base


def _floats(*nodes: fx.Node) -> bool:
    return all(n.meta["val"].is_floating_point() for n in nodes)


def cast_like(emit: Emit, x: fx.Node, like: fx.Node) -> fx.Node:
    """`x` in the dtype of `like`."""
    dtype = like.meta["val"].dtype
    same = x.meta["val"].dtype == dtype
    return x if same else emit(aten._to_copy.default, x, dtype=dtype)


def _flat(emit: Emit, x: Any, shape: list[int]) -> fx.Node:
    """`x` in the order of its elements, without the views of it that keep this order."""
    want = list(torch.empty(_shape(x), device="meta").reshape(shape).shape)
    while x.target is aten.reshape.default or _turns_one(x):
        x = x.args[0]
    return shaped(emit, x, want)


def _turns_one(x: fx.Node) -> bool:
    """Whether `x` is a transpose that moves a dim of size 1 only."""
    if x.target is not aten.permute.default or x.args[1] != _SWAPPED:
        return False
    return 1 in _shape(x)[1:]


def _join_views(editor: Editor) -> None:
    """A view of a view is one view of the base."""
    for node in list(editor.graph.nodes):
        if node.target is aten.reshape.default and node.args[0].target is aten.reshape.default:
            base: Any = node.args[0].args[0]
            editor.replace(node, shaped(editor.at(node), base, _shape(node)))


def _shape(x: Any) -> list[int]:
    return [int(n) for n in x.meta["val"].shape]
