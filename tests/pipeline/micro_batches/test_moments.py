"""When each node of a program runs, and what becomes of collectives that name `micro`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import stacks
from small_programs import Builder, lines
from subjects import program
from tutti.errors import ShardingError
from tutti.graph.analysis.state import is_state
from tutti.graph.ops import collectives
from tutti.graph.ops.boundary import boundary
from tutti.layout import Layout
from tutti.passes.pass_table import ready_to_split
from tutti.passes.target import Target
from tutti.pipeline.micro_batches.moments import (
    AFTER,
    BEFORE,
    DURING,
    Moments,
    moments_of,
    sums_over_time,
)

aten = torch.ops.aten


def moments(name: str, layout: str) -> Moments:
    made = stacks.subject(name).program(Layout.parse(layout))
    graph = ready_to_split(made, Target(donated=frozenset()), ())
    return moments_of(graph, made.layout.micro, made.layout)


CASES = [
    *((n, "micro=4") for n in ("stack", "thrice", "telling", "summed", "decay", "penalty")),
    *((n, "data=2 zero=3 micro=7") for n in ("stack", "telling", "summed")),
    *((n, "data=2 pipe=2") for n in ("stack", "normed", "contrastive")),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_moments_follow_each_other(name: str, layout: str) -> None:
    """Only sums lead out of a micro-batch; nothing within one waits for what comes after it."""
    made = moments(name, layout)
    early = {n for level in made.early for n in level}
    for node in made.graph.nodes:
        times = {made.when[x] for x in node.all_input_nodes}
        if node in early:
            assert made.when[node] == BEFORE
        elif node in made.sums:
            assert made.when[node] == AFTER and times == {DURING}
        elif node.op != "output":
            order = (BEFORE, DURING, AFTER)
            waits = made.when[node] == AFTER and all(made.when[u] == AFTER for u in node.users)
            assert waits or made.when[node] in (
                max(times, key=order.index, default=BEFORE),
                DURING,
            )
            assert not (AFTER in times and DURING in times)
    assert {BEFORE, DURING, AFTER} == set(made.when.values())
    assert len({n.args for n in made.sums}) == len(made.sums)


@pytest.mark.parametrize("layout", ["data=2 zero=1 micro=7", "data=2 zero=1 pipe=2 micro=7"])
def test_parts_of_weights_for_the_update_wait_for_it(layout: str) -> None:
    """They would take memory during the micro-batches."""
    made = moments("stack", layout)
    shards = [n for n in made.graph.nodes if n.target is collectives.shard]
    parts = [n for n in shards if is_state(n.all_input_nodes[0])]
    assert len(parts) >= 2 * stacks.DEPTH
    assert all(made.when[n] == AFTER for n in parts)


@pytest.mark.parametrize("layout", ["data=2 micro=7", "data=2 zero=2 micro=7"])
def test_each_gradient_crosses_ranks_once_a_step(layout: str) -> None:
    """Added up over micro-batches first, as it comes, then reduced over ranks."""
    made = moments("stack", layout)
    over_ranks = [
        n
        for n in made.graph.nodes
        if n.target in collectives.REDUCTIONS and "data" in collectives.axes_of(n)
    ]
    large = [n for n in over_ranks if n.args[0].meta["val"].numel() > 4]
    assert len(large) >= 2 * stacks.DEPTH
    assert all(made.when[n] == AFTER for n in large)
    assert all(collectives.axes_of(n) == ("data",) for n in large)
    assert not any(made.when[n] == DURING for n in over_ranks)


def test_sums_come_before_what_is_linear() -> None:
    made = moments("stack", "data=2 micro=7")
    views = ("permute.default", "reshape.default")
    for total in made.sums:
        source: Any = total.args[0]
        assert str(source.target).removeprefix("aten.") not in views
        assert source.target not in collectives.REDUCTIONS


def test_a_count_of_targets_comes_first() -> None:
    """It is all that is early: one number, summed over ranks, too, before the first micro-batch."""
    made = moments("stack", "data=2 micro=7")
    ((count,),) = made.early
    assert str(count.args[0].target) == "aten.sum.dim_IntList" and not count.meta["val"].shape  # type: ignore[union-attr]
    (reduced,) = count.users
    assert collectives.axes_of(reduced) == ("data",) and made.when[reduced] == BEFORE


def test_what_every_micro_batch_has_alike_is_added_up_early() -> None:
    """The gradient of a bias behind a sum over rows: as many times as there are rows."""
    made = moments("summed", "micro=4")
    found = [n for level in made.early for n in level]
    assert [tuple(n.meta["val"].shape) for n in found] == [(stacks.NUM_CLASSES,)]
    assert found[0] in made.graph.nodes and made.when[found[0].args[0]] == BEFORE  # type: ignore[index]


def test_with_one_micro_batch_statistics_over_ranks_stay_within() -> None:
    made = moments("normed", "data=2 pipe=2")
    inside = [n for n in made.during() if n.target is collectives.all_reduce]
    assert len(inside) >= 2 * stacks.DEPTH  # mean and variance of each norm
    assert not any(sums_over_time(n) for n in inside)


def moved(target: Any, *args: Any, rows: int, out: tuple[int, ...]) -> list[str]:
    """One collective over a batch, in the form that is sorted; what it makes is returned."""
    build = Builder()
    x = build.given("x", 16, 6, kind="batch")
    part = build.call(collectives.shard, x, ("data", "micro"), 0, 1, shape=(rows, 6))
    result = build.call(target, part, *args, shape=out)
    graph = build.done([result], [])
    layout = Layout.parse("data=2 micro=2")
    moments_of(graph, 2, layout)
    graph.lint()
    check_shapes(graph)
    return lines(graph)[1:]


def check_shapes(graph: fx.Graph) -> None:
    """A join over a factor of two doubles its dim, also on the way."""
    for node in graph.nodes:
        if node.target is collectives.all_gather:
            x: Any = node.args[0]
            dim: Any = node.args[2]
            factor = 2 ** len(collectives.axes_of(node))
            assert node.meta["val"].shape[dim] == factor * x.meta["val"].shape[dim]


def test_a_join_over_ranks_and_time_takes_the_minor_axis_first() -> None:
    axes = ("data", "micro")
    found = moved(collectives.all_gather, axes, 0, 1, rows=4, out=(16, 6))
    assert [line.partition("(")[2].split(", ", 1)[1] for line in found] == [
        "micro, 0, 1)",
        "data, 0, 1)",
    ]
    found = moved(collectives.all_gather, axes[::-1], 0, 1, rows=4, out=(16, 6))
    assert [line.partition("(")[2].split(", ", 1)[1] for line in found] == [
        "data, 0, 1)",
        "micro, 0, 1)",
    ]


def test_a_refusal_names_an_op_of_the_step() -> None:
    """Not the part of a value, nor the mark of an update, in front of it."""
    build = Builder()
    x = build.given("x", 16, 6, kind="batch")
    weight = build.given("weight", 6, 6, kind="parameter")
    part = build.call(collectives.shard, x, ("micro",), 0, 1, shape=(8, 6))
    product = build.call(aten.mm.default, part, weight, shape=(8, 6))
    total = build.call(collectives.all_reduce, product, ("micro",), "sum", shape=(8, 6))
    own = build.call(collectives.shard, total, ("micro",), 0, 1, shape=(4, 6))
    marked = build.call(boundary, own, shape=(4, 6))
    graph = build.done([build.call(aten.relu.default, marked, shape=(4, 6))], [])
    with pytest.raises(ShardingError, match="relu needs all its samples at once"):
        moments_of(graph, 2, Layout.parse("micro=2"))


def test_an_exchange_over_time_is_a_join_and_a_part() -> None:
    found = moved(collectives.all_to_all, ("micro",), 1, 1, 0, 1, rows=4, out=(8, 3))
    assert [line.partition("(")[0] for line in found] == ["all_gather", "shard"]
    assert found[1].endswith("micro, 1, 1)")


def test_a_scattered_sum_over_time_is_a_sum_and_a_part() -> None:
    found = moved(collectives.reduce_scatter, ("micro",), 1, 1, "sum", rows=4, out=(4, 3))
    assert [line.partition("(")[0] for line in found] == ["all_reduce", "shard"]


def test_a_model_of_the_zoo_keeps_its_update_behind_the_micro_batches() -> None:
    made = program("gpt", "micro=4")
    graph = ready_to_split(made, Target(donated=frozenset()), ())
    sorted_ = moments_of(graph, 4, made.layout)
    updates = [
        n for n in graph.nodes if n.meta.get("region") == "update" and "adamw" in str(n.target)
    ]
    assert updates and all(sorted_.when[n] == AFTER for n in updates)
