"""Rewrites a fresh graph in place to a canonical form, with the same values up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from tutti.capture.spelling.compounds import COMPOUNDS
from tutti.capture.spelling.expert_products import take_products_by_expert
from tutti.capture.spelling.fused_products import part_fused_products
from tutti.capture.spelling.rewrites import AGAIN, REWRITES, SAME, shape_list
from tutti.capture.spelling.sorted_rows import put_rows_back, refuse_sorted
from tutti.capture.spelling.strided import STRIDED, note_layout
from tutti.graph.edits.edit import Editor, erase_dead, squares
from tutti.torch_private.fake_tensors import FakeTensorMode

aten = torch.ops.aten
# On a node of a trace with symbols for sizes that is canonical already.
SETTLED = "settled"
_SHARED_VIEWS = (aten.reshape.default, aten.permute.default, aten.expand.default)


def canonicalize(graph: fx.Graph, owner: nn.Module, mode: FakeTensorMode) -> None:
    """Apply every rewrite in place: same values up to rounding, fewer kinds of ops."""
    editor = Editor(graph, mode)
    _take_regions_apart(graph)
    note_layout(graph)
    for node in list(graph.nodes):
        _rewrite(editor, node)
    for node in list(graph.nodes):
        if node.target is aten.linalg_vector_norm.default:
            _norm_of_norms(editor, node)
    _share(editor)
    if put_rows_back(editor) + take_products_by_expert(editor):
        _share(editor)
    part_fused_products(editor)
    erase_dead(graph)
    refuse_sorted(graph)
    graph.lint()


def canonicalize_but(
    is_sized: Callable[[fx.Node], bool], graph: fx.Graph, mode: FakeTensorMode
) -> None:
    """`canonicalize` in advance, for a trace with symbols for sizes: the rewrites that do not read sizes.

    `is_sized` tests whether a node's value has such a size. Each graph made of the trace then needs fewer
    rewrites.
    """
    if any(node.target in STRIDED for node in graph.nodes):
        return  # these read the strides of operands, which a removed copy would have changed
    editor, before = Editor(graph, mode), set(graph.nodes)
    _take_regions_apart(graph)
    for node in list(graph.nodes):
        if node.target in SAME or not any(map(is_sized, (node, *node.all_input_nodes))):
            _rewrite(editor, node)
            if node.target is aten.linalg_vector_norm.default:
                _norm_of_norms(editor, node)
    erase_dead(graph)
    for node in graph.nodes:
        if node not in before:
            node.meta[SETTLED] = True


def _rewrite(editor: Editor, node: fx.Node) -> None:
    """Rewrite a node, and then the nodes of its replacement."""
    if node.meta.get(SETTLED):
        return
    known = REWRITES.get(node.target) or COMPOUNDS.get(node.target)
    rewrite = known if node.op == "call_function" else None
    if rewrite is None:
        return
    before = node.prev
    new = rewrite(editor.at(node), node)
    if new is None:
        return
    last = node.prev
    editor.replace(node, new)
    while last is not before:
        earlier = last.prev
        if last.target in AGAIN:
            _rewrite(editor, last)
        last = earlier


def _share(editor: Editor) -> None:
    """Merge equal views or casts of one value in one region, so that their users share reshards.

    For a weight, merge them in the whole step: one cast, in its storage sharding, serves every region.
    """
    seen: dict[Any, fx.Node] = {}
    for node in list(editor.graph.nodes):
        cast = node.target is aten._to_copy.default
        if not cast and node.target not in _SHARED_VIEWS:
            continue
        source: Any = node.args[0]
        region = node.meta.get("region")
        if cast and source.meta.get("kind") == "parameter" and region in ("forward", "backward"):
            region = ""
        rest = tuple(node.kwargs.items()) if cast else tuple(node.args[1])  # type: ignore[arg-type]
        key = (node.target, source, rest, region)
        if seen.setdefault(key, node) is not node:
            editor.replace(node, seen[key])


def _take_regions_apart(graph: fx.Graph) -> None:
    """Assign nodes after the last backward that depend on a gradient to the update."""
    nodes = list(graph.nodes)
    last = max((i for i, n in enumerate(nodes) if n.meta.get("region") == "backward"), default=-1)
    depends: set[fx.Node] = set()
    for i, node in enumerate(nodes):
        region = node.meta.setdefault("region", "forward")
        if region == "backward" or any(a in depends for a in node.all_input_nodes):
            depends.add(node)
        if node.op == "call_function" and i > last and region == "forward" and node in depends:
            node.meta["region"] = "update"


def _norm_of_norms(editor: Editor, node: fx.Node) -> None:
    """norm(stack(norm(g) for g)) sums squares once: one small reduction in place of one per tensor."""
    given: Any = node.args
    order = given[1] if len(given) > 1 else 2
    stacked = given[0]
    if order != 2 or not isinstance(stacked, fx.Node) or shape_list(node):
        return
    if stacked.target is not aten.stack.default or len(stacked.users) > 1:
        return
    norms: Any = stacked.args[0]
    for norm in norms:
        plain = norm.target is aten.linalg_vector_norm.default and not shape_list(norm)
        if not plain or (len(norm.args) > 1 and norm.args[1] != 2):
            return
    emit = editor.at(node)
    sums = []
    for norm in norms:
        g = norm.args[0]
        dims, dtype = list(range(len(shape_list(g)))), norm.meta["val"].dtype
        sums.append(emit(aten.sum.dim_IntList, squares(emit, g), dims, False, dtype=dtype))
    total = emit(aten.sum.dim_IntList, emit(aten.stack.default, sums), [0], False)
    editor.replace(node, emit(aten.sqrt.default, total))
