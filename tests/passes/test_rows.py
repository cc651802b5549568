"""`rows`: before and after as text; the same bits; what is left as it is."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

from small_programs import Builder, lines
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh, Sharding
from tutti.passes.rows import rows

aten = torch.ops.aten
LEAD, ROWS = (2, 3), 6


def _mlp(b: Builder, x: fx.Node, w: fx.Node, v: fx.Node) -> fx.Node:
    """As capture writes two layers on [2, 3, 4]."""
    flat = b.call(aten.reshape.default, x, [ROWS, 4], shape=(ROWS, 4))
    up = b.call(aten.mm.default, flat, w, shape=(ROWS, 5))
    whole = b.call(aten.reshape.default, up, [*LEAD, 5], shape=(*LEAD, 5))
    acted = b.call(aten.gelu.default, whole)
    again = b.call(aten.reshape.default, acted, [ROWS, 5], shape=(ROWS, 5))
    down = b.call(aten.mm.default, again, v, shape=(ROWS, 4))
    return b.call(aten.reshape.default, down, [*LEAD, 4], shape=(*LEAD, 4))


def _block() -> fx.Graph:
    """Norm, two layers and a sum, a mean over the last dim, and a gradient of a bias."""
    b = Builder()
    x, w, v = b.given("x", *LEAD, 4, kind="batch"), b.given("w", 4, 5), b.given("v", 5, 4)
    scale = b.given("scale", 4)
    several = b.graph.call_function(aten.native_layer_norm.default, (x, [4], scale, None, 1e-5))
    stat = torch.empty(*LEAD, 1)
    several.meta = {"val": (torch.empty(*LEAD, 4), stat, stat)}
    normed = b.call(operator.getitem, several, 0, shape=(*LEAD, 4))
    inverse = b.call(operator.getitem, several, 2, shape=(*LEAD, 1))
    made = _mlp(b, normed, w, v)
    total = b.call(aten.add.Tensor, x, made)
    mean = b.call(aten.mean.dim, total, [-1], True, shape=(*LEAD, 1))
    scaled = b.call(aten.mul.Tensor, b.call(aten.sub.Tensor, total, mean), inverse)
    row = b.call(aten.sum.dim_IntList, scaled, [0, 1], shape=(4,))
    return b.done([_mlp(b, scaled, w, v), row], [])


def test_before_and_after() -> None:
    b = Builder()
    x, w, v = b.given("x", *LEAD, 4, kind="batch"), b.given("w", 4, 5), b.given("v", 5, 4)
    graph = b.done([_mlp(b, x, w, v)], [])
    assert lines(graph) == [
        "reshape(%x, [6, 4])",
        "mm(%3, %w)",
        "reshape(%4, [2, 3, 5])",
        "gelu(%5)",
        "reshape(%6, [6, 5])",
        "mm(%7, %v)",
        "reshape(%8, [2, 3, 4])",
    ]
    assert rows(graph) == 2
    graph.lint()
    assert lines(graph) == [
        "reshape(%x, [6, 4])",
        "mm(%3, %w)",
        "gelu(%4)",
        "mm(%5, %v)",
        "reshape(%6, [2, 3, 4])",
    ]


def test_norms_sums_and_means_are_of_rows_too() -> None:
    graph = _block()
    rows(graph)
    graph.lint()
    assert lines(graph) == [
        "reshape(%x, [6, 4])",
        "native_layer_norm(%4, [4], %scale, None, 1e-05)",
        "item(%5, 0)",
        "item(%5, 2)",
        "mm(%6, %w)",
        "gelu(%8)",
        "mm(%9, %v)",
        "add.Tensor(%4, %10)",
        "mean.dim(%11, [1], True)",
        "sub.Tensor(%11, %12)",
        "mul.Tensor(%13, %7)",
        "sum.dim_IntList(%14, [0])",
        "mm(%14, %w)",
        "gelu(%16)",
        "mm(%17, %v)",
        "reshape(%18, [2, 3, 4])",
    ]


def _run(graph: fx.Graph) -> list[Any]:
    torch.manual_seed(0)
    given = [torch.randn(n.meta["val"].shape) for n in graph.nodes if n.op == "placeholder"]
    ((returned, _),) = VirtualRanks(Mesh(())).run(graph, nn.Module(), [given])
    return returned


def test_the_same_bits_and_shapes() -> None:
    graph = _block()
    before = _run(graph)
    assert rows(graph) > 0
    for a, b in zip(_run(graph), before, strict=True):
        assert a.shape == b.shape and torch.equal(a, b)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            args = fx.map_arg(node.args, lambda n: n.meta["val"])
            made, val = node.target(*args), node.meta["val"]
            pairs = zip(made, val, strict=True) if isinstance(val, tuple) else [(made, val)]
            assert all(m.shape == v.shape for m, v in pairs), node


@pytest.mark.parametrize("target", [aten.softmax.int, aten.cumsum.default])
def test_what_does_not_treat_rows_alike_stays(target: Any) -> None:
    b = Builder()
    x, w = b.given("x", ROWS, 4, kind="batch"), b.given("w", 4, 4)
    whole = b.call(aten.reshape.default, x, [*LEAD, 4], shape=(*LEAD, 4))
    over_sequence = b.call(target, whole, 1)
    flat = b.call(aten.reshape.default, over_sequence, [ROWS, 4], shape=(ROWS, 4))
    assert rows(b.done([b.call(aten.mm.default, flat, w)], [])) == 0


def test_a_value_that_lies_otherwise_in_memory_stays() -> None:
    b = Builder()
    x = b.given("x", 3, 2, 4, kind="batch")
    turned = b.call(aten.permute.default, x, [1, 0, 2], shape=(2, 3, 4))
    turned.meta["val"] = torch.empty(3, 2, 4).permute(1, 0, 2)
    acted = b.call(aten.relu.default, turned)
    acted.meta["val"] = torch.empty(3, 2, 4).permute(1, 0, 2)
    flat = b.call(aten.reshape.default, acted, [ROWS, 4], shape=(ROWS, 4))
    assert rows(b.done([flat], [])) == 0


def test_a_row_for_each_place_of_the_sequence_is_not_one_for_each_row() -> None:
    """[2, 3, 4] + [3, 4] is not rows + [3, 4]; with a batch of one it is."""
    for num_samples, saved in ((2, 0), (1, 2)):
        b = Builder()
        x, places = b.given("x", 3 * num_samples, 4, kind="batch"), b.given("p", 3, 4)
        whole = b.call(aten.reshape.default, x, [num_samples, 3, 4], shape=(num_samples, 3, 4))
        total = b.call(aten.add.Tensor, whole, places)
        flat = b.call(aten.reshape.default, total, [3 * num_samples, 4], shape=(3 * num_samples, 4))
        graph = b.done([flat], [])
        before = _run(graph)
        assert rows(graph) == saved
        assert torch.equal(_run(graph)[0], before[0])


def test_one_number_of_all_rows_stays() -> None:
    """The loss of a regression: the mean of [2, 3, 4]."""
    b = Builder()
    x, y, w = (
        b.given("x", ROWS, 4, kind="batch"),
        b.given("y", *LEAD, 4, kind="batch"),
        b.given("w", 4, 4),
    )
    made = b.call(aten.reshape.default, b.call(aten.mm.default, x, w), [*LEAD, 4], shape=(*LEAD, 4))
    square = b.call(aten.pow.Tensor_Scalar, b.call(aten.sub.Tensor, made, y), 2)
    loss = b.call(aten.mean.default, square)
    loss.meta["val"] = torch.empty(())
    graph = b.done([loss], [])
    before = _run(graph)
    rows(graph)
    assert torch.equal(_run(graph)[0], before[0])


def test_a_turn_that_saves_nothing_is_not_made() -> None:
    b = Builder()
    x = b.given("x", *LEAD, 4, kind="batch")
    assert rows(b.done([b.call(aten.relu.default, b.call(aten.relu.default, x))], [])) == 0


def test_who_takes_both_forms_keeps_both() -> None:
    """As the forward of a stage gives its backward what an activation and a matmul have read."""
    b = Builder()
    x, w = b.given("x", ROWS, 4, kind="batch"), b.given("w", 4, 5)
    made = b.call(aten.mm.default, x, w, shape=(ROWS, 5))
    acted = b.call(
        aten.relu.default, b.call(aten.reshape.default, made, [*LEAD, 5], shape=(*LEAD, 5))
    )
    flat = b.call(aten.reshape.default, acted, [ROWS, 5], shape=(ROWS, 5))
    matmul = b.call(aten.mm.default, flat, b.given("v", 5, 4), shape=(ROWS, 4))
    graph = b.done([flat, acted, matmul], [])
    before = _run(graph)
    assert rows(graph) == 1
    graph.lint()
    for after, expected in zip(_run(graph), before, strict=True):
        assert after.shape == expected.shape and torch.equal(after, expected)


def test_the_sharding_of_rows() -> None:
    b = Builder()
    x, w, v = b.given("x", *LEAD, 4, kind="batch"), b.given("w", 4, 5), b.given("v", 5, 4)
    made = _mlp(b, x, w, v)
    graph = b.done([made], [])
    (acted,) = (n for n in graph.nodes if n.target is aten.gelu.default)
    for text, expected in (
        ("8@data, 3, 5", "24@data, 5"),
        ("8@data, 6@seq, 5@tensor", "8@data*6@seq, 5@tensor"),
        ("8, 6@seq, 5 {partial data}", "8*6@seq, 5 {partial data}"),
    ):
        copy = fx.Graph()
        mapped: dict[fx.Node, fx.Node] = {}
        copy.output(copy.graph_copy(graph, mapped))
        mapped[acted].meta["sharding"] = Sharding.parse(text)
        assert rows(copy) == 2
        assert str(mapped[acted].meta["sharding"]) == expected
