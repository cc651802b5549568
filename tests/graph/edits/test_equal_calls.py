"""Calls that are alike are worked out once, and only those; walks through a graph end early."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from tutti.graph.analysis.order import ancestors, ancestors_where, descendants_where
from tutti.graph.edits.edit import Editor

aten = torch.ops.aten


def inputs_of(graph: fx.Graph, mode: FakeTensorMode, *shapes: tuple[int, ...]) -> list[Any]:
    nodes = []
    for k, shape in enumerate(shapes):
        node = graph.placeholder(f"x{k}")
        with mode:
            node.meta["val"] = torch.empty(shape)
        nodes.append(node)
    return nodes


def test_equal_calls_have_equal_values_and_others_their_own() -> None:
    graph, mode = fx.Graph(), FakeTensorMode()
    x, y, z = inputs_of(graph, mode, (2, 3), (2, 3), (4, 3))
    editor = Editor(graph, mode)
    emit = editor.at(graph.output(()))
    first = emit(aten.sum.dim_IntList, x, [0], False)
    again = emit(aten.sum.dim_IntList, y, [0], False)
    assert again.meta["val"] is first.meta["val"]
    for args in ((x, [1], False), (x, [0], True), (z, [1], False)):
        other = emit(aten.sum.dim_IntList, *args).meta["val"]
        assert (
            other.shape
            == aten.sum.dim_IntList(torch.empty(args[0].meta["val"].shape), *args[1:]).shape
        )
    assert emit(aten.mul.Tensor, x, 2).meta["val"].dtype == torch.float32
    whole = emit(aten.full.default, [2], 1).meta["val"]
    assert (whole.dtype, emit(aten.full.default, [2], 1.0).meta["val"].dtype) == (
        torch.int64,
        torch.float32,
    )


def test_what_is_known_of_calls_ends_with_their_mode() -> None:
    """It was kept for ever: the values that were known held the mode, by which they were known."""
    graph, mode = fx.Graph(), FakeTensorMode()
    (x,) = inputs_of(graph, mode, (2, 3))
    Editor(graph, mode).at(graph.output(()))(aten.neg.default, x)
    ended = weakref.ref(mode)
    del graph, mode, x
    gc.collect()
    assert ended() is None


def test_walks_that_end_early_find_the_same() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    c = graph.call_function(aten.neg.default, (a,))
    d = graph.call_function(aten.add.Tensor, (c, b))
    e = graph.call_function(aten.neg.default, (d,))
    assert ancestors_where([d], lambda n: True) == ancestors([d]) == {a, b, c, d}
    assert ancestors_where([d], lambda n: n is not a) is None
    assert descendants_where([c], lambda n: True) == {c, d, e}
    assert descendants_where([c], lambda n: n is not e) is None
