"""`in_buffer`: before and after as text; the values stay; few buffers are held."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from small_programs import SHARED, Builder, lines
from tutti.graph.ops import collectives
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.passes import in_buffer as module
from tutti.passes import shared_buffers as buffers
from tutti.passes.in_buffer import in_buffer
from tutti.passes.in_place import in_place
from tutti.passes.shared_buffers import leave_buffers, place_buffers, shared_buffers

aten = torch.ops.aten
HERE = ("data",)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LEAST_NBYTES", 64)


def _gradients(count: int = 1, *, dim: int = 0, last: bool = False) -> fx.Graph:
    """Matmuls whose sums over the ranks are scattered, each used at once or all of them at the end."""
    b = Builder()
    x = b.given("batch.0", 4, 4, kind="batch")
    total, parts = b.call(aten.sum.default, x, shape=(1,)), []
    for _ in range(count):
        matmul = b.call(aten.mm.default, x, x)
        shape = (2, 4) if dim == 0 else (4, 2)
        part = b.call(collectives.reduce_scatter, matmul, HERE, dim, 1, "sum", shape=shape)
        parts.append(part)
        if not last:
            total = b.call(aten.add.Tensor, total, b.call(aten.sum.default, part, shape=(1,)))
    for part in parts if last else ():
        total = b.call(aten.add.Tensor, total, b.call(aten.sum.default, part, shape=(1,)))
    graph = b.done([total], [])
    shared_buffers(graph, SHARED)
    return graph


def test_before_and_after() -> None:
    graph = _gradients()
    before = lines(graph)
    assert in_buffer(graph) == 1
    graph.lint()
    assert before[3:] == [
        "together_(reduce_scatter, [%3], data, [[0, 1]], sum)",
        "item(%4, 0)",
        "sum(%5)",
        "add.Tensor(%1, %6)",
    ]
    assert lines(graph)[:3] == before[:3]
    assert lines(graph)[3:] == [
        "together_(reduce_part, [%3], data, [[0, 1]], sum)",
        "item(%4, 0)",
        "part(%5, data, 0, 1)",
        "sum(%6)",
        "add.Tensor(%1, %7)",
    ]


@pytest.mark.parametrize("count", [1, 5])
def test_the_values_stay(count: int) -> None:
    x = torch.randn(2, 4, 4)
    runs = []
    for rewritten in (False, True):
        graph = _gradients(count)
        assert not rewritten or in_buffer(graph) == count
        in_place(graph, ())
        leave_buffers(graph)
        place_buffers(graph)
        graph.lint()
        ranks = VirtualRanks(Mesh((("data", 2),)))
        runs.append(ranks.run(graph, nn.Module(), [[x[0]], [x[1]]]))
    for (plain, _), (kept, _) in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


def test_buffers_are_taken_again_once_the_results_are_used() -> None:
    graph = _gradients(5)
    in_buffer(graph)
    assert place_buffers(graph) == {HERE: 64}


def test_no_more_are_held_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_NBYTES", 130)
    graph = _gradients(8, last=True)  # 8 x 64 bytes; two fit, be it as bytes or as a quarter
    assert in_buffer(graph) == 2


def test_a_part_in_pieces_is_new() -> None:
    assert in_buffer(_gradients(dim=1)) == 0


def test_what_is_given_out_is_new() -> None:
    b = Builder()
    x = b.given("batch.0", 4, 4, kind="batch")
    matmul = b.call(aten.mm.default, x, x)
    part = b.call(collectives.reduce_scatter, matmul, HERE, 0, 1, "sum", shape=(2, 4))
    graph = b.done([part], [])
    shared_buffers(graph, SHARED)
    assert in_buffer(graph) == 0
