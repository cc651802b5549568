"""`shared_buffers`: before and after as text; buffers that live at the same time do not overlap."""

from __future__ import annotations

import itertools
from operator import getitem

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from small_programs import APART, SHARED, Builder, lines
from tutti.graph.ops import collectives
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.passes import shared_buffers as module
from tutti.passes.in_place import in_place
from tutti.passes.shared_buffers import leave_buffers, place_buffers, shared_buffers

aten = torch.ops.aten
HERE = ("data",)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_NBYTES", 64)


def _gradients() -> fx.Graph:
    """A matmul that only its reduction needs, a value that others need too, and a small one."""
    b = Builder()
    x = b.given("batch.0", 4, 4, kind="batch")
    matmul = b.call(aten.mm.default, x, x)
    sine = b.call(aten.sin.default, x)
    small = b.call(aten.sum.dim_IntList, x, [0], shape=(4,))
    where = [(0, 1), (0, 1), (0, 1)]
    made = b.call(
        collectives.together,
        "reduce_scatter",
        [matmul, sine, small],
        HERE,
        where,
        "sum",
        shape=(1,),
    )
    made.meta["val"] = [torch.empty(2, 4), torch.empty(2, 4), torch.empty(2)]
    items = [b.call(getitem, made, i, shape=v.shape) for i, v in enumerate(made.meta["val"])]
    return b.done([sine, *items], [])


def test_before_and_after() -> None:
    graph = _gradients()
    assert shared_buffers(graph, SHARED) == 2
    needed = place_buffers(graph)
    graph.lint()
    assert lines(graph) == [
        "buffer(data, 0, [4, 4], f32)",
        "mm.out(%batch.0, %batch.0, out=%1)",
        "sin(%batch.0)",
        "sum.dim_IntList(%batch.0, [0])",
        "buffer(data, 64, [4, 4], f32)",
        "copy_(%5, %3)",
        "together_(reduce_scatter, [%2, %6], data, [[0, 1], [0, 1]], sum)",
        "together(reduce_scatter, [%4], data, [[0, 1]], sum)",
        "item(%7, 0)",
        "item(%7, 1)",
        "item(%8, 0)",
    ]
    assert needed == {HERE: 128}


def test_the_values_stay() -> None:
    x = torch.randn(2, 4, 4)
    runs = []
    for target in (APART, SHARED):
        graph = _gradients()
        shared_buffers(graph, target)
        place_buffers(graph)
        ranks = VirtualRanks(Mesh((("data", 2),)))
        runs.append(ranks.run(graph, nn.Module(), [[x[0]], [x[1]]]))
    for (plain, _), (shared, _) in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, shared, strict=True))


@pytest.mark.parametrize("padding", [-1, 2])
def test_an_embedding_s_gradient_is_added_up_in_its_buffer(padding: int) -> None:
    def build() -> fx.Graph:
        b = Builder()
        rows, index = b.given("rows", 2, 3, 5, kind="batch"), b.given("at", 2, 3, kind="batch")
        table = b.call(
            aten.embedding_dense_backward.default, rows, index, 7, padding, False, shape=(7, 5)
        )
        return b.done([b.call(collectives.all_reduce, table, HERE, "sum")], [])

    feeds = [[torch.randn(2, 3, 5), torch.randint(0, 7, (2, 3))] for _ in range(2)]
    results = []
    for target in (APART, SHARED):
        graph = build()
        assert shared_buffers(graph, target) == (target is SHARED)
        place_buffers(graph)
        graph.lint()
        results.append(VirtualRanks(Mesh((("data", 2),))).run(graph, nn.Module(), feeds)[1][0][0])
    torch.testing.assert_close(results[1], results[0])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 6)), min_size=1, max_size=12))
def test_buffers_that_live_at_once_lie_apart(sizes: list[tuple[int, int]]) -> None:
    """Buffers of some sizes, each needed for some steps."""
    b = Builder()
    x = b.given("x", 1, kind="batch")
    until: dict[int, list[fx.Node]] = {}
    lives: dict[fx.Node, tuple[int, int]] = {}
    for step, (size, life) in enumerate(sizes):
        made = b.graph.call_function(collectives.buffer, (HERE, 0, [size], torch.float32))
        made.meta = {"val": torch.empty(size)}
        lives[made] = (step, step + life)
        until.setdefault(step + life, []).append(made)
        for due in until.pop(step, []):
            b.call(aten.neg.default, due)
    for step in sorted(until):
        for due in until[step]:
            b.call(aten.neg.default, due)
    needed = place_buffers(b.done([x], []))[HERE]
    for one, two in itertools.combinations(lives, 2):
        if lives[one][1] >= lives[two][0] and lives[two][1] >= lives[one][0]:
            first, second = sorted((_range(one), _range(two)))
            assert first[1] <= second[0]
    assert needed == max(_range(one)[1] for one in lives)
    assert needed <= sum(-(-size * 4 // 64) * 64 for size, _ in sizes)


def _range(node: fx.Node) -> tuple[int, int]:
    offset: int = node.args[1]  # type: ignore[assignment]
    nbytes = node.meta["val"].nbytes
    return offset, offset + -(-nbytes // 64) * 64


def test_nothing_is_given_out_of_a_buffer() -> None:
    b = Builder()
    x = b.given("batch.0", 4, 4, kind="batch")
    total = b.call(collectives.all_reduce, b.call(aten.mm.default, x, x), HERE, "sum")
    new = b.call(aten.mul.Tensor, total, 0.5)
    graph = b.done([], [new])
    shared_buffers(graph, SHARED)
    in_place(graph, ())
    leave_buffers(graph)
    assert lines(graph)[-2:] == ["mul_.Tensor(%4, 0.5)", "clone(%5)"]


def test_a_bias_is_added_by_the_matmul() -> None:
    def build() -> fx.Graph:
        b = Builder()
        x, w, bias = b.given("x", 4, 4, kind="batch"), b.given("w", 4, 4), b.given("b", 4)
        row = b.call(collectives.partialize, bias, HERE, "sum")
        added = b.call(aten.add.Tensor, b.call(aten.mm.default, x, w), row)
        return b.done([b.call(collectives.all_reduce, added, HERE, "sum")], [])

    feeds = [[torch.randn(4, 4), torch.randn(4, 4), torch.ones(4)] for _ in range(2)]
    results = []
    for target in (APART, SHARED):
        graph = build()
        shared_buffers(graph, target)
        place_buffers(graph)
        graph.lint()
        results.append(VirtualRanks(Mesh((("data", 2),))).run(graph, nn.Module(), feeds)[0][0])
    assert "addmm.out(%3, %x, %w, out=%4)" in lines(graph)
    torch.testing.assert_close(results[1], results[0])
