"""`accumulate`: before and after as text, the same totals, and none added where something else reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tutti.graph.analysis.cost import rates_for
from tutti.graph.ops.loop import Body, Do, LoopPart, Sum, loop
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.graph.text import text
from tutti.layout import Mesh
from tutti.passes.accumulate import accumulate

aten = torch.ops.aten
NUM_MICRO = 3


def part(*, read_later: bool = False) -> LoopPart:
    """g and x to the gradient of a weight, g @ x, and that of a bias, the sum of g."""
    graph = fx.Graph()

    def note(node: fx.Node, *shape: int) -> fx.Node:
        node.meta["val"] = torch.empty(shape)
        return node

    g, x = note(graph.placeholder("g"), 4, 2), note(graph.placeholder("x"), 2, 3)
    weight = note(graph.call_function(aten.mm.default, (g, x)), 4, 3)
    bias = note(graph.call_function(aten.sum.dim_IntList, (g, [1])), 4)
    double = note(graph.call_function(aten.mul.Tensor, (weight, 2.0)), 4, 3)
    graph.output(([double] if read_later else [], [weight, bias]))
    if not read_later:
        graph.erase_node(double)
    return LoopPart(graph, ("g", "x"), ("double",) if read_later else (), ("weight", "bias"))


def body(made: LoopPart, *, op: str = "sum") -> Body:
    row = tuple(Do("B", 0, k) for k in range(NUM_MICRO))
    sums = (Sum("weight", "sum"), Sum("bias", op))
    return Body(NUM_MICRO, {(0, "B"): made}, row, ("g", "x"), sums, ("weight", "bias"))


def played(made: Body, g: Tensor, x: Tensor) -> list[Tensor]:
    graph = fx.Graph()
    given = [graph.placeholder("g"), graph.placeholder("x")]
    args: Any = (made, given)
    graph.output((graph.call_function(loop, args), []))
    return VirtualRanks(Mesh()).run(graph, nn.Module(), [[g, x]])[0][0]


def ops(graph: fx.Graph) -> list[str]:
    return [line.partition(" = ")[2].partition("(")[0].strip() for line in text(graph).splitlines()]


def test_before_and_after() -> None:
    (made,) = accumulate(body(part())).parts.values()
    assert made.adding is not None and made.num_added == 2
    assert ops(made.graph) == ["input", "input", "mm", "sum.dim_IntList"]
    assert ops(made.adding) == ["input"] * 4 + ["addmm_", "sum.dim_IntList", "add_.Tensor"]


def test_a_matmul_that_something_else_reads_is_made_as_before() -> None:
    (made,) = accumulate(body(part(read_later=True))).parts.values()
    assert made.adding is not None
    assert ops(made.adding)[4:] == [
        "mm",
        "add_.Tensor",
        "sum.dim_IntList",
        "add_.Tensor",
        "mul.Tensor",
    ]


@pytest.mark.parametrize("op", ["sum", "max"])
def test_the_same_totals(op: str) -> None:
    g, x = torch.randn(4, 2).double(), torch.randn(2, 3).double()
    plain = body(part(), op=op)
    before = (g.clone(), x.clone())
    for made in (plain, accumulate(plain)):
        weight, bias = played(made, g, x)
        torch.testing.assert_close(weight, NUM_MICRO * (g @ x))
        torch.testing.assert_close(bias, g.sum(1) * (NUM_MICRO if op == "sum" else 1))
    assert all(torch.equal(a, b) for a, b in zip(before, (g, x), strict=True))


def test_one_micro_batch_has_nothing_to_add_to() -> None:
    made = Body(
        1,
        {(0, "B"): part()},
        (Do("B", 0, 0),),
        ("g", "x"),
        (Sum("weight", "sum"), Sum("bias", "sum")),
        ("weight", "bias"),
    )
    assert accumulate(made).parts[0, "B"].adding is None


def _cast() -> LoopPart:
    """g and x in 16 bits to the gradient of a weight in 32."""
    graph = fx.Graph()
    g, x = graph.placeholder("g"), graph.placeholder("x")
    g.meta["val"], x.meta["val"] = torch.empty(4, 2).bfloat16(), torch.empty(2, 3).bfloat16()
    half = graph.call_function(aten.mm.default, (g, x))
    half.meta["val"] = torch.empty(4, 3).bfloat16()
    wide = graph.call_function(aten._to_copy.default, (half,), {"dtype": torch.float32})
    wide.meta["val"] = torch.empty(4, 3)
    graph.output(([], [wide]))
    return LoopPart(graph, ("g", "x"), (), ("weight",))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_sum_on_a_gpu_reads_the_narrow_gradient(kind: str) -> None:
    row = tuple(Do("B", 0, k) for k in range(NUM_MICRO))
    plain = Body(
        NUM_MICRO, {(0, "B"): _cast()}, row, ("g", "x"), (Sum("weight", "sum"),), ("weight",)
    )
    with rates_for(kind):
        added = accumulate(plain)
    found = ops(added.parts[0, "B"].adding or fx.Graph())
    casts = ["_to_copy"] if kind == "cpu" else []
    assert found == ["input"] * 3 + ["mm", *casts, "add_.Tensor"]
    g, x = torch.randn(4, 2).bfloat16(), torch.randn(2, 3).bfloat16()
    before, after = played(plain, g, x)[0], played(added, g, x)[0]
    assert after.dtype == torch.float32 and torch.equal(before, after)


@pytest.mark.parametrize("padding", [-1, 2])
def test_rows_of_an_embedding(padding: int) -> None:
    graph = fx.Graph()
    grad, index = graph.placeholder("grad"), graph.placeholder("index")
    grad.meta["val"], index.meta["val"] = torch.randn(2, 3, 4), torch.tensor([[1, 2, 1], [0, 2, 2]])
    made = graph.call_function(
        aten.embedding_dense_backward.default, (grad, index, 5, padding, False)
    )
    made.meta["val"] = torch.empty(5, 4)
    graph.output(([], [made]))
    part = LoopPart(graph, ("grad", "index"), (), ("table",))
    row = tuple(Do("B", 0, k) for k in range(NUM_MICRO))
    sums = (Sum("table", "sum"),)
    plain = Body(NUM_MICRO, {(0, "B"): part}, row, ("grad", "index"), sums, ("table",))
    added = accumulate(plain)
    found = ops(added.parts[0, "B"].adding or graph)
    assert ("index_add_" in found) == (padding == -1)
    given = (grad.meta["val"], index.meta["val"])
    torch.testing.assert_close(played(added, *given), played(plain, *given))
