"""`linear`: before and after as text; the same bits."""

from __future__ import annotations

import torch
from torch import fx, nn

from small_programs import Builder, lines
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.passes.linear import linear

aten = torch.ops.aten


def _layer(
    *, bias: bool = True, backward: bool = False, shape: tuple[int, ...] = (2, 3, 4)
) -> fx.Graph:
    b = Builder()
    x, w, c = b.given("x", *shape, kind="batch"), b.given("w", 5, 4), b.given("b", 5)
    rows = x if len(shape) == 2 else b.call(aten.reshape.default, x, [6, 4], shape=(6, 4))
    turned = b.call(aten.permute.default, w, [1, 0], shape=(4, 5))
    numbers = rows.meta["val"].shape[0]
    target, first = (aten.addmm.default, (c,)) if bias else (aten.mm.default, ())
    matmul = b.call(target, *first, rows, turned, shape=(numbers, 5))
    result = matmul
    if len(shape) > 2:
        result = b.call(aten.reshape.default, matmul, [2, 3, 5], shape=(2, 3, 5))
    returned = [result]
    if backward:
        back = b.call(aten.permute.default, rows, [1, 0], shape=(4, numbers))
        returned.append(b.call(aten.mm.default, back, matmul, shape=(4, 5)))
    return b.done(returned, [])


def test_before_and_after() -> None:
    graph = _layer()
    assert lines(graph) == [
        "reshape(%x, [6, 4])",
        "permute(%w, [1, 0])",
        "addmm(%b, %3, %4)",
        "reshape(%5, [2, 3, 5])",
    ]
    assert linear(graph) == 1
    graph.lint()
    assert lines(graph) == ["linear(%x, %w, %b)"]


def test_what_the_backward_needs_stays() -> None:
    graph = _layer(bias=False, backward=True)
    assert linear(graph) == 1
    graph.lint()
    assert lines(graph) == [
        "reshape(%x, [6, 4])",
        "linear(%3, %w)",
        "reshape(%4, [2, 3, 5])",
        "permute(%3, [1, 0])",
        "mm(%6, %4)",
    ]


def test_a_matmul_of_rows() -> None:
    graph = _layer(shape=(6, 4))
    assert linear(graph) == 1
    assert lines(graph) == ["linear(%x, %w, %b)"]


def test_other_matmuls_stay() -> None:
    b = Builder()
    x, w = b.given("x", 4, 4, kind="batch"), b.given("w", 4, 4)
    assert linear(b.done([b.call(aten.mm.default, x, w)], [])) == 0


def test_the_same_bits() -> None:
    given = [torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)]
    for bias in (True, False):
        found = []
        for rewritten in (False, True):
            graph = _layer(bias=bias)
            assert not rewritten or linear(graph) == 1
            ((returned, _),) = VirtualRanks(Mesh(())).run(graph, nn.Module(), [list(given)])
            found.append(returned[0])
        assert torch.equal(*found)
