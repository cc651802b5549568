"""`bucket`: before and after as text; what may not stand together stays apart."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from small_programs import APART, SHARED, Builder, lines
from tutti.graph.analysis.cost import rates_for
from tutti.graph.ops import collectives
from tutti.layout import Mesh
from tutti.passes import bucket as module
from tutti.passes.bucket import bucket, bucket_shares
from tutti.passes.target import Target

aten = torch.ops.aten
HERE = ("data",)
MESH = Mesh.parse("data=2")


def _reductions(*, chained: bool = False) -> fx.Graph:
    """Two gradients, reduced where the update needs them; `chained`: the second needs the first's sum."""
    b = Builder()
    x = b.given("batch.0", 4, 4, kind="batch")
    first = b.call(aten.mul.Tensor, x, 2.0)
    one = b.call(collectives.reduce_scatter, first, HERE, 0, 1, "sum", shape=(2, 4))
    more = b.call(aten.sum.default, one, shape=(1,)) if chained else 1.0
    second = b.call(aten.add.Tensor, first, more)
    two = b.call(collectives.reduce_scatter, second, HERE, 0, 1, "sum", shape=(2, 4))
    return b.done([], [b.call(aten.add.Tensor, one, two)])


def test_reductions_before_and_after() -> None:
    graph = _reductions()
    assert lines(graph) == [
        "mul.Tensor(%batch.0, 2.0)",
        "reduce_scatter(%1, data, 0, 1, sum)",
        "add.Tensor(%1, 1.0)",
        "reduce_scatter(%3, data, 0, 1, sum)",
        "add.Tensor(%2, %4)",
    ]
    assert bucket(graph, APART, MESH) == 1
    graph.lint()
    assert lines(graph) == [
        "mul.Tensor(%batch.0, 2.0)",
        "add.Tensor(%1, 1.0)",
        "together(reduce_scatter, [%1, %2], data, [[0, 1], [0, 1]], sum)",
        "item(%3, 0)",
        "item(%3, 1)",
        "add.Tensor(%4, %5)",
    ]


@pytest.mark.parametrize("large_last", [False, True])
def test_joined_collectives_have_the_region_of_the_largest(large_last: bool) -> None:
    b = Builder()
    x, y = b.given("batch.0", 4, 4, kind="batch"), b.given("batch.1", 40, 4, kind="batch")
    sums = []
    for value, region in [(x, "forward"), (y, "update")][:: 1 if large_last else -1]:
        shape = tuple(value.meta["val"].shape)
        sums.append(b.call(collectives.all_reduce, value, HERE, "sum", shape=shape))
        sums[-1].meta["region"] = region
    graph = b.done([], sums)
    assert bucket(graph, APART, MESH) == 1
    (joined,) = (n for n in graph.nodes if n.target is collectives.together)
    assert joined.meta["region"] == "update"


def test_what_needs_another_s_result_stays_behind_it() -> None:
    graph = _reductions(chained=True)
    assert bucket(graph, APART, MESH) == 0
    graph.lint()


def _gathers(*shape: int) -> fx.Graph:
    """Two weights gathered at once, far before they are needed."""
    b = Builder()
    w, v = b.given("w", *shape), b.given("v", *shape)
    whole = (2 * shape[0], *shape[1:])
    one = b.call(collectives.all_gather, w, HERE, 0, 1, shape=whole)
    two = b.call(collectives.all_gather, v, HERE, 0, 1, shape=whole)
    x = b.call(aten.mul.Tensor, w, 3.0)
    for _ in range(20):
        x = b.call(aten.mul.Tensor, x, 3.0)
    y = b.call(aten.sum.default, one, shape=(1,))
    for _ in range(20):
        y = b.call(aten.mul.Tensor, y, 3.0)
    return b.done([x, b.call(aten.mul.Tensor, two, y)], [])


def test_gathers_come_late_and_not_too_many_at_once() -> None:
    graph = _gathers(400, 400)  # 1.28 MB each when whole
    assert bucket(graph, APART, MESH) == 0  # the second is needed much later
    names = [
        n.target for n in graph.nodes if n.target is collectives.all_gather or n.args[1:] == (3.0,)
    ]
    assert names.index(collectives.all_gather) == 21


def test_gathers_that_cost_no_memory_are_one() -> None:
    graph = _gathers(400, 400)
    assert bucket(graph, SHARED, MESH) == 1


@pytest.mark.parametrize(
    ("few", "many", "ranks", "device", "count"),
    [
        (25e6, 1e6, 8, "cuda", 1),
        (1e6, 25e6, 8, "cuda", 0),
        (25e6, 1e6, 16, "cuda", 0),
        (1e6, 25e6, 16, "cuda", 1),
        (1e6, 25e6, 16, "cpu", 0),
    ],
)
def test_a_bucket_holds_so_many_bytes(
    few: float, many: float, ranks: int, device: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUCKET_NBYTES", few)
    monkeypatch.setattr(module, "LARGE_BUCKET_NBYTES", many)
    monkeypatch.setattr(module, "SPAN", 1.0)
    with rates_for(device):
        assert bucket(_gathers(400, 400), APART, Mesh.parse(f"data={ranks} tensor=2")) == count


def _loss(*, clipped: bool = False) -> fx.Graph:
    """A sum over the batch, divided by how many count; then a gradient. `clipped`: it needs the loss."""
    b = Builder()
    x, y = b.given("batch.0", 4, 4, kind="batch"), b.given("batch.1", 4, kind="batch")
    w = b.given("w", 4)
    made = b.call(aten.mul.Tensor, x, w)
    total = b.call(aten.sum.default, made, shape=(1,))
    count = b.call(aten.sum.default, b.call(aten.ne.Scalar, y, -100), shape=(1,))
    several = [b.call(collectives.all_reduce, value, HERE, "sum") for value in (total, count)]
    loss = b.call(aten.div.Tensor, *several)
    grad = b.call(aten.div.Tensor, b.call(aten.sum.dim_IntList, x, [0], shape=(4,)), several[1])
    if clipped:
        grad = b.call(aten.mul.Tensor, grad, loss)
    reduced = b.call(collectives.all_reduce, grad, HERE, "sum")
    return b.done([loss], [b.call(aten.sub.Tensor, w, reduced)])


def test_a_count_is_reduced_first_and_a_loss_last() -> None:
    graph = _loss()
    assert lines(graph) == [
        "mul.Tensor(%batch.0, %w)",
        "sum(%3)",
        "ne.Scalar(%batch.1, -100)",
        "sum(%5)",
        "all_reduce(%4, data, sum)",
        "all_reduce(%6, data, sum)",
        "div.Tensor(%7, %8)",
        "sum.dim_IntList(%batch.0, [0])",
        "div.Tensor(%10, %8)",
        "all_reduce(%11, data, sum)",
        "sub.Tensor(%w, %12)",
    ]
    assert bucket(graph, SHARED, MESH) == 1
    graph.lint()
    assert lines(graph) == [
        "ne.Scalar(%batch.1, -100)",
        "sum(%3)",
        "all_reduce(%4, data, sum)",
        "mul.Tensor(%batch.0, %w)",
        "sum(%6)",
        "sum.dim_IntList(%batch.0, [0])",
        "div.Tensor(%8, %5)",
        "together(all_reduce, [%7, %9], data, [[], []], sum)",
        "item(%10, 0)",
        "item(%10, 1)",
        "div.Tensor(%11, %5)",
        "sub.Tensor(%w, %12)",
    ]


def test_a_loss_that_the_update_needs_is_not_kept_waiting() -> None:
    graph = _loss(clipped=True)
    assert bucket(graph, SHARED, MESH) == 0
    graph.lint()
    reductions = [n for n in graph.nodes if n.target is collectives.all_reduce]
    assert len(reductions) == 3 and lines(graph)[0].startswith("ne")


def test_what_is_random_or_large_is_not_moved_to_the_front() -> None:
    def first(target: object, num: int) -> str:
        b = Builder()
        w, x = b.given("w", 4), b.given("batch.0", num, kind="batch")
        start = b.call(aten.mul.Tensor, w, 2.0)
        drawn = b.call(target, x, 0.5)  # type: ignore[arg-type]
        total = b.call(
            collectives.all_reduce, b.call(aten.sum.default, drawn, shape=(1,)), HERE, "sum"
        )
        graph = b.done([b.call(aten.add.Tensor, start, total)], [])
        bucket(graph, SHARED, MESH)
        return lines(graph)[0].partition("(")[0]

    assert first(aten.mul.Tensor, 4) == "mul.Tensor" and first(aten.gt.Scalar, 4) == "gt.Scalar"
    assert first(aten.bernoulli.p, 4) == "mul.Tensor"
    assert first(aten.gt.Scalar, 2**20) == "mul.Tensor"


def _cast_gathers(*, updated: bool = False) -> fx.Graph:
    """Two weights cast, gathered and used in turn; `updated`: the second is overwritten before."""
    b = Builder()
    w, v = b.given("w", 400, 400), b.given("v", 400, 400)
    y = b.given("batch.0", 800, 400, kind="batch")
    for weight in (w, v):
        cast = b.call(aten.sigmoid.default, weight)
        whole = b.call(collectives.all_gather, cast, HERE, 0, 1, shape=(800, 400))
        y = b.call(aten.mul.Tensor, y, whole)
        if updated and weight is w:
            b.call(aten.add_.Tensor, v, v)
    return b.done([y], [])


@pytest.mark.parametrize(("target", "count"), [(APART, 1), (SHARED, 0)])
def test_casts_of_weights_move_with_their_gathers(
    target: Target, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that share memory would keep every weight whole at once."""
    monkeypatch.setattr(module, "SPAN", 1.0)
    graph = _cast_gathers()
    assert bucket(graph, target, MESH) == count
    graph.lint()
    if count:
        assert lines(graph)[:3] == [
            "sigmoid(%w)",
            "sigmoid(%v)",
            "together(all_gather, [%3, %4], data, [[0, 1], [0, 1]], )",
        ]


def test_a_cast_stays_behind_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPAN", 1.0)
    assert bucket(_cast_gathers(updated=True), APART, MESH) == 0


@pytest.mark.parametrize(
    ("megabytes", "count"),
    [
        ([30.0, 30.0], 2.0),
        ([0.01, 30.0, 0.01, 30.0, 0.01], 2.0),  # small ones join others
        ([10.0, 10.0, 10.0], 1.4),  # the last one is not full
        ([0.01], 0.0004),
        ([], 0.0),
    ],
)
def test_the_number_of_buckets(megabytes: list[float], count: float) -> None:
    sizes = [int(1e6 * size) for size in megabytes]
    assert sum(bucket_shares(sizes, 25e6)) == pytest.approx(count, rel=0.01)


def test_tensors_share_a_bucket_by_their_bytes() -> None:
    sizes = [int(1e6 * size) for size in (20, 60, 40, 10, 30)]
    assert bucket_shares(sizes, 100e6) == pytest.approx([0.25, 0.75, 0.4, 0.1, 0.3])
    assert bucket_shares([*sizes, 200_000_000], 100e6)[2:] == pytest.approx([0.5, 0.125, 0.375, 1])
