"""`overlap`: before and after as text; what is under way is neither freed nor overwritten."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

import subjects
from ranks import Ranks
from runs import train
from small_programs import APART, SHARED, Builder, lines
from tutti.graph.ops import collectives
from tutti.layout import Layout
from tutti.passes.in_place import in_place
from tutti.passes.overlap import overlap

aten = torch.ops.aten
HERE = ("data",)


def _reduction(gap: int = 5) -> fx.Graph:
    """A gradient that is ready long before its sum is needed, and dead after that."""
    b = Builder()
    x = b.given("batch.0", 4, 4, kind="batch")
    gradient = b.call(aten.mul.Tensor, x, 2.0)
    total = b.call(collectives.all_reduce, gradient, HERE, "sum")
    y = b.call(aten.sin.default, gradient)
    for _ in range(gap - 1):
        y = b.call(aten.mul.Tensor, y, 3.0)
    return b.done([y], [b.call(aten.add.Tensor, total, y)])


def test_before_and_after() -> None:
    graph = _reduction(gap=3)
    assert overlap(graph, APART) == 1
    graph.lint()
    assert lines(graph) == [
        "mul.Tensor(%batch.0, 2.0)",
        "start(all_reduce, [%1], data, [[]], sum)",
        "sin(%1)",
        "mul.Tensor(%3, 3.0)",
        "mul.Tensor(%4, 3.0)",
        "finish(%2, [%1])",
        "item(%6, 0)",
        "add.Tensor(%7, %5)",
    ]


def test_what_is_needed_at_once_is_not_handed_over() -> None:
    assert overlap(_reduction(gap=1), APART) == 0


def test_one_matmul_is_work_enough() -> None:
    b = Builder()
    x = b.given("batch.0", 4, 4, kind="batch")
    total = b.call(collectives.all_reduce, x, HERE, "sum")
    y = b.call(aten.mm.default, x, x)
    assert overlap(b.done([], [b.call(aten.add.Tensor, total, y)]), APART) == 1


def test_ranks_that_share_memory_have_nothing_to_overlap() -> None:
    assert overlap(_reduction(), SHARED) == 0


def test_what_is_under_way_is_not_overwritten() -> None:
    """Without the pass `sin` may write over the gradient; with it, the gradient is being sent then."""
    for apart, name in ((True, "sin"), (False, "sin_")):
        graph = _reduction()
        if apart:
            overlap(graph, APART)
        in_place(graph, ())
        assert any(line.startswith(f"{name}(") for line in lines(graph)), lines(graph)


@pytest.mark.parametrize("cast", [False, True])
def test_a_gather_starts_when_the_one_before_is_waited_for(cast: bool) -> None:
    """A cast of a weight moves with its gather."""
    b = Builder()
    weights = [b.given(name, 2, 4) for name in "uvw"]
    y = b.given("batch.0", 4, 4, kind="batch")
    for weight in weights:
        part = b.call(aten.sigmoid.default, weight) if cast else weight
        whole = b.call(collectives.all_gather, part, HERE, 0, 1, shape=(4, 4))
        for _ in range(5):
            y = b.call(aten.mul.Tensor, y, whole)
    graph = b.done([y], [])
    assert overlap(graph, APART) == 2
    graph.lint()
    names = [n.target.__name__ for n in graph.nodes if n.target in collectives.PLAYED]
    # The first is needed at once; the second starts before it, the third when the second is waited for.
    assert names == ["start", "together", "start", "finish", "finish"]


def test_a_scatter_ends_when_the_next_one_starts() -> None:
    """One whole gradient is in progress while the next is made, however late the update reads them."""
    b = Builder()
    x = b.given("batch.0", 4, 4, kind="batch")
    shards: list[fx.Node] = []
    for k in range(4):
        y = x
        for _ in range(4):
            y = b.call(aten.mul.Tensor, y, 2.0 + k)
        shards.append(b.call(collectives.reduce_scatter, y, HERE, 0, 1, "sum", shape=(2, 4)))
    graph = b.done([], [b.call(aten.neg.default, shard) for shard in shards])
    assert overlap(graph, APART) == 4
    graph.lint()
    names = [n.target.__name__ for n in graph.nodes if n.target in collectives.PLAYED]
    assert names == ["start", "finish"] * 4


def _over_gloo(name: str, layout: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUTTI_SHARED_MEMORY", "off")
        return train(name, layout, steps)


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=1", "data=2 zero=3"])
def test_over_gloo_the_losses_are_those_of_one_device(ranks: Ranks, layout: str) -> None:
    graph = subjects.program("gpt", layout)
    assert Layout.parse(layout) == graph.layout
    one = ranks.after(train, "gpt", "", 4)
    for losses, _ in one.run(_over_gloo, "gpt", layout, 4, n=2):
        assert losses == pytest.approx(one.result[0], rel=1e-5)
