"""Weights that are frozen, unfrozen and added between steps, on real ranks."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import frozen_replicas as training
from ranks import Ranks
from replicas_train import State, largest_difference
from tutti.layout import Layout

STEPS = 10
# (frozen at first, {after step: [(layer, trained)]})
UNFREEZE = ((0,), {2: [(0, True)]})
FREEZE = ((), {4: [(0, False)]})
IN_FLIGHT = ((), {3: [(0, False)]})  # a round of every=3 has begun
ON_AND_OFF = ((2,), {2: [(2, True)], 4: [(0, False), (3, False)], 7: [(0, True), (2, False)]})


def check(ranks: Ranks, layout: str, how: tuple[tuple[int, ...], training.Script]) -> None:
    laid_out = Layout.parse(layout)
    n, count = laid_out.num_ranks, laid_out.num_replicas
    found = ranks.run(training.train, layout, *how, STEPS, n=n)
    expected = training.simulate(laid_out.sync, count, *how, STEPS)
    for rank, states in enumerate(found):
        for state, wanted in zip(states, expected, strict=True):
            assert largest_difference(state, wanted[rank * count // n]) < 1e-12


def test_each_pipeline_rank_has_the_roster_of_all(ranks: Ranks) -> None:
    layout = "replica=2 pipe=2 micro=2 sync=diloco(every=3, delay=2)"
    found = ranks.run(training.train, layout, *ON_AND_OFF, STEPS, n=4)
    expected = training.simulate(Layout.parse(layout).sync, 2, *ON_AND_OFF, STEPS, norm=False)
    for rank, states in enumerate(found):
        for state, wanted in zip(states, expected, strict=True):
            here = {n: x for n, x in wanted[rank // 2].items() if n in state}
            assert here and largest_difference(state, here) < 1e-12


@pytest.mark.parametrize("how", [UNFREEZE, FREEZE, IN_FLIGHT, ON_AND_OFF])
@pytest.mark.parametrize(
    "sync", ["average(every=3)", "diloco(every=3)", "diloco(every=3, delay=2)"]
)
def test_a_weight_takes_part_in_the_round_after_a_step_that_trains_it(
    ranks: Ranks, sync: str, how: tuple[tuple[int, ...], training.Script]
) -> None:
    check(ranks, f"replica=2 sync={sync}", how)


@pytest.mark.parametrize(
    "layout",
    [
        "replica=4 sync=diloco(every=3, delay=1)",
        "replica=2 data=2 zero=3 sync=diloco(every=3, delay=2)",
        "replica=2 data=2 zero=1 sync=average(every=3)",
    ],
)
def test_shards_and_more_replicas_do_too(ranks: Ranks, layout: str) -> None:
    check(ranks, layout, ON_AND_OFF)


@pytest.mark.parametrize("sync", ["average(every=3)", "diloco(every=3, delay=1)", "gossip()"])
def test_replicas_agree_on_a_weight_after_it_is_frozen(ranks: Ranks, sync: str) -> None:
    one, other = (
        found[-1] for found in ranks.run(training.train, f"replica=2 sync={sync}", *FREEZE, 8, n=2)
    )
    for name in ("0.weight", "0.bias"):
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-15)


@pytest.mark.parametrize("sync", ["average(every=3)", "diloco(every=3)"])
def test_a_weight_that_an_optimizer_gets_later_joins(ranks: Ranks, sync: str) -> None:
    found = ranks.run(training.train_with_new_group, f"replica=2 sync={sync}", 2, 6, n=2)
    for expected, states in zip(
        training.simulate(sync, 2, *UNFREEZE, 6), zip(*found, strict=True), strict=True
    ):
        for state, wanted in zip(states, expected, strict=True):
            assert largest_difference(state, wanted) < 1e-12


@pytest.mark.parametrize("begin", [3, 5, 8])
@pytest.mark.parametrize(
    "layout",
    [
        "replica=2 sync=average(every=3, traffic=bf16)",
        "replica=2 sync=diloco(every=4, fragments=2, delay=3)",
        "replica=2 sync=gossip(every=2, delay=3)",
        "replica=2 pipe=2 micro=2 sync=gossip(every=1, delay=1)",
    ],
)
def test_a_run_resumes_exactly_whatever_is_frozen(
    ranks: Ranks, tmp_path: Path, layout: str, begin: int
) -> None:
    how = ((2, 3), {2: [(2, True)], 4: [(0, False)], 7: [(0, True), (2, False)]})
    given = (layout, *how, STEPS, str(tmp_path / "saved"), begin)
    n = Layout.parse(layout).num_ranks
    for whole, rest in zip(
        ranks.run(training.train, *given, n=n), ranks.run(training.train, *given, n=n), strict=True
    ):
        assert len(rest) == STEPS - begin
        for state, wanted in zip(rest, whole[begin:], strict=True):
            assert same(state, wanted)


def same(one: State, other: State) -> bool:
    """Whether all tensors have the same bits."""
    return one.keys() == other.keys() and all(np.array_equal(one[n], x) for n, x in other.items())


@pytest.mark.parametrize("sync", ["average(every=3)", "diloco(every=3, delay=1)"])
def test_replicas_that_train_other_weights_are_refused(ranks: Ranks, sync: str) -> None:
    """Both programs are known by then, so that no capture tells them apart."""
    both = {1: [(0, False)], 2: [(0, True)], 3: [(0, False)]}
    alone = (1, {1: [(0, False)], 2: [(0, True)]})
    layout = f"replica=2 sync={sync}"
    found = ranks.run(training.train, layout, (), both, 8, "", 0, alone, n=2)
    for said in found:
        assert isinstance(said, str) and said.startswith("CommError: replicas differ")
        assert '"0.weight"' in said


def test_a_weight_that_begins_with_other_values_is_refused(ranks: Ranks) -> None:
    for said in ranks.run(training.train_unlike, "replica=2 sync=diloco(every=3)", n=2):
        assert said.startswith('CommError: "0.weight" has not begun with the same value')


@pytest.mark.parametrize("sync", ["average(every=2)", "gossip(every=2)", "average(every=50)"])
def test_a_replica_that_traces_alone_ends_the_run_soon(ranks: Ranks, sync: str) -> None:
    """Rank 1 freezes a layer; rank 0 waits in a round, or has gone on, or comes to its next call."""
    alone = (1, {2: [(0, False)]})
    begun = time.monotonic()
    for said in ranks.run(training.train, f"replica=2 sync={sync}", (), {}, 300, "", 0, alone, n=2):
        assert isinstance(said, str)
        assert said.startswith(
            "CommError: replicas differ: replica 1 traces the step anew after step 2"
        )
        assert '"0.weight" is frozen' in said and "gloo" not in said.lower()
    assert time.monotonic() - begun < 30


def test_replicas_trace_together_between_rounds(ranks: Ranks) -> None:
    """Rank 1 is late: rank 0 waits for it before its trace."""
    both = {1: [(0, False)], 4: [(0, True), (2, False)]}
    found = ranks.run(training.train, "replica=2 sync=average(every=5)", (), both, 7, n=2)
    assert not any(isinstance(states, str) for states in found), found
