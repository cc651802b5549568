"""`shared_state`: before and after as text, and no write while another rank may still read."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from small_programs import APART, SHARED, Builder, Named, lines, targets
from tutti.graph.ops import collectives
from tutti.passes.in_place import in_place
from tutti.passes.shared_state import copy_parts_given_away, shared_state, wait_for_readers

aten = torch.ops.aten
HERE = ("data",)


def _zero3(*, dim: int = 0, synced: bool = False) -> fx.Graph:
    """A weight in parts: gathered, used, its part updated; `synced`: with a collective in between."""
    b = Builder()
    w = b.given("w", 2, 4)
    whole = b.call(collectives.all_gather, w, HERE, dim, 1, shape=(4, 4) if dim == 0 else (2, 8))
    loss = b.call(aten.sum.default, whole, shape=())
    if synced:
        loss = b.call(collectives.all_reduce, loss, HERE, "sum", shape=())
    return b.done([loss], [b.call(aten.mul.Tensor, w, 0.9)])


def _applied(graph: fx.Graph, target: object = SHARED) -> fx.Graph:
    shared_state(graph, Named(["w"]), target)  # type: ignore[arg-type]
    in_place(graph, {"w"})
    wait_for_readers(graph)
    graph.lint()
    return graph


def test_parts_are_looked_at_where_they_lie() -> None:
    assert lines(_applied(_zero3())) == [
        "together_(all_gather, [%w], data, [[0, 1]], )",
        "item(%1, 0)",
        "sum(%2)",
        "meet(data)",  # the other rank may not have summed it up yet
        "mul_.Tensor(%w, 0.9)",
    ]


def test_a_collective_in_between_is_enough() -> None:
    graph = _applied(_zero3(synced=True))
    assert targets(graph) == ["together_", "all_reduce"]


def test_a_dim_whose_parts_do_not_lie_side_by_side_is_copied() -> None:
    assert targets(_applied(_zero3(dim=1))) == ["together"]


def test_ranks_that_share_nothing_copy() -> None:
    assert targets(_applied(_zero3(), APART)) == ["all_gather"]


def _zero1(*, read_late: bool = False) -> fx.Graph:
    """A weight that each rank has whole; its part is updated, the parts are gathered."""
    b = Builder()
    w, g = b.given("w", 4, 4), b.given("batch.0", 2, 4, kind="batch")
    used = b.call(aten.sum.default, w, shape=())
    mine = b.call(collectives.shard, w, HERE, 0, 1, shape=(2, 4))
    decayed = b.call(aten.mul.Tensor, mine, 0.9)
    new = b.call(aten.add.Tensor, decayed, g)
    late = b.call(aten.sum.default, w, shape=()) if read_late else used
    whole = b.call(collectives.all_gather, new, HERE, 0, 1, shape=(4, 4))
    return b.done([late], [whole])


def test_a_part_is_updated_where_it_lies() -> None:
    assert lines(_applied(_zero1())) == [
        "sum(%w)",
        "part(%w, data, 0, 1)",
        "mul_.Tensor(%3, 0.9)",
        "add_.Tensor(%4, %batch.0)",
        "gather_into([w], [%5], data, [[0, 1]])",
        "item(%6, 0)",
        "meet(data)",  # the other rank may still take over this part, which the user may change now
    ]


def test_nobody_leaves_while_another_looks_at_its_part() -> None:
    """As where a model is evaluated: its weights are whoever's behind the last node."""
    b = Builder()
    w = b.given("w", 2, 4)
    whole = b.call(collectives.all_gather, w, HERE, 0, 1, shape=(4, 4))
    graph = b.done([b.call(aten.sum.default, whole, shape=())], [])
    shared_state(graph, Named([]), SHARED)  # type: ignore[arg-type]
    assert wait_for_readers(graph) == 1
    assert targets(graph) == ["together_", "meet"]


def test_a_view_that_is_needed_later_keeps_the_old_value() -> None:
    """`gather_into` would write over what a view made before it looks at."""
    b = Builder()
    w = b.given("w", 4, 4)
    row = b.call(aten.select.int, w, 0, 0, shape=(4,))
    mine = b.call(collectives.shard, w, HERE, 0, 1, shape=(2, 4))
    whole = b.call(collectives.all_gather, mine, HERE, 0, 1, shape=(4, 4))
    graph = b.done([b.call(aten.sum.default, row, shape=())], [whole])
    shared_state(graph, Named(["w"]), SHARED)  # type: ignore[arg-type]
    assert collectives.gather_into not in [n.target for n in graph.nodes]


def test_a_weight_that_is_read_later_is_not_overwritten() -> None:
    text = lines(_applied(_zero1(read_late=True)))
    assert "mul.Tensor(%3, 0.9)" in text or "mul.Tensor(%2, 0.9)" in text
    assert text.index("sum(%w)") < text.index(next(x for x in text if x.startswith("gather_into")))


def test_a_part_that_is_given_away_is_copied() -> None:
    """Each rank's lies at another place of the shared memory."""
    b = Builder()
    w = b.given("w", 4, 4)
    mine = b.call(collectives.part, w, HERE, 0, 1, shape=(2, 4))
    flat = b.call(aten.reshape.default, mine, [8], shape=(8,))
    both = [b.call(collectives.all_gather, x, HERE, 0, 1, shape=(16,)) for x in (flat, flat)]
    graph = b.done(both, [])
    assert copy_parts_given_away(graph) == 2
    assert lines(graph)[2:] == [
        "clone(%2)",
        "all_gather(%3, data, 0, 1)",
        "clone(%2)",
        "all_gather(%5, data, 0, 1)",
    ]
    assert copy_parts_given_away(graph) == 0


@pytest.mark.parametrize("donated", [frozenset({"w"}), frozenset()])
def test_only_what_may_be_overwritten_is_gathered_into(donated: frozenset[str]) -> None:
    graph = _zero1()
    target = type(SHARED)(donated=donated, shared=SHARED.shared)
    shared_state(graph, Named(["w"]), target)  # type: ignore[arg-type]
    into = [n for n in graph.nodes if n.target is collectives.gather_into]
    assert len(into) == len(donated)
