"""Replicas on real ranks: as on virtual ones, waiting for nobody between rounds, resumed exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import replicas_train as training
from ranks import Ranks
from tutti.layout import Layout

STEPS = 10
TWO = [
    "replica=2 sync=average(every=1)",
    "replica=2 sync=average(every=4, after=2, traffic=bf16)",
    "replica=2 sync=diloco(every=3)",
    "replica=2 sync=diloco(every=4, fragments=3, delay=2)",
    "replica=2 sync=diloco(every=2, traffic=int8)",
    "replica=2 sync=gossip(every=2, delay=1)",
]
FOUR = [
    "replica=4 sync=average(every=2, then=4)",
    "replica=4 sync=gossip()",
    "replica=2 data=2 zero=1 sync=diloco(every=2)",
    "replica=2 data=2 zero=3 sync=diloco(every=3, fragments=2, delay=1)",
    "replica=2 tensor=2 sync=average(every=3)",
]


def check(ranks: Ranks, layout: str, kind: str = "adamw") -> None:
    laid_out = Layout.parse(layout)
    n, count = laid_out.num_ranks, laid_out.num_replicas
    found = ranks.run(training.train, layout, STEPS, kind, n=n)
    expected = training.reference(laid_out.sync, count, STEPS, kind)
    for rank, (losses, state) in enumerate(found):
        expected_losses, expected_state = expected[rank * count // n]
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
        assert training.largest_difference(state, expected_state) < 1e-6
    # Replicas really see different samples.
    assert expected[0][0][0] != expected[1][0][0]


@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_train_as_virtual_ones(ranks: Ranks, layout: str) -> None:
    check(ranks, layout)


@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks_train_as_virtual_ones(ranks: Ranks, layout: str) -> None:
    check(ranks, layout)


def test_running_statistics_are_averaged(ranks: Ranks) -> None:
    check(ranks, "replica=2 sync=diloco(every=4, traffic=bf16)", "norm")
    check(ranks, "replica=2 sync=diloco(every=3, delay=2)", "norm")


def test_averaging_every_step_of_sgd_is_data_parallelism(ranks: Ranks) -> None:
    by_data = ranks.run(training.train, "data=2", STEPS, "sgd", n=2)
    by_replicas = ranks.run(training.train, "replica=2 sync=average(every=1)", STEPS, "sgd", n=2)
    weights = {n: x for n, x in by_data[0][1].items() if not n.startswith("optim")}
    for _, state in by_replicas:
        assert training.largest_difference(state, weights) < 1e-12


@pytest.mark.parametrize(
    ("sync", "steps", "late_at", "seen_at"),
    [
        ("average(every=6)", 6, 2, 5),
        ("diloco(every=6, delay=3)", 9, 6, 8),
        ("gossip(every=1, delay=3)", 6, 2, 4),
        ("elastic(every=1)", 8, 2, 8),
        ("pairs(every=1)", 8, 2, 8),
    ],
)
def test_a_late_replica_stops_nobody_between_rounds(
    ranks: Ranks, tmp_path: Path, sync: str, steps: int, late_at: int, seen_at: int
) -> None:
    note = str(tmp_path / "seen")
    found = ranks.run(training.one_replica_is_late, sync, steps, late_at, seen_at, note, n=2)
    assert found == [[], [seen_at]]


def test_an_evaluation_sees_the_whole_batch_with_the_weights_of_its_replica(ranks: Ranks) -> None:
    import torch

    found = ranks.run(training.evaluate, "replica=2 sync=average(every=4)", n=2)
    x, _ = training.batch_at(0)
    for returned, _, state in found:
        model, _ = training.make()
        model.load_state_dict(
            {n: torch.tensor(v) for n, v in state.items() if n in model.state_dict()}
        )
        np.testing.assert_allclose(returned, model(x).tolist(), rtol=1e-12)
    assert found[0][0] != found[1][0]


@pytest.mark.parametrize("sync", ["average(every=1)", "average(every=3)", "diloco(every=2)"])
def test_a_step_that_trains_by_hand_splits_the_batch(ranks: Ranks, sync: str) -> None:
    """As one with an optimizer: another loss on each replica, the same weights after a round."""
    layout = f"replica=2 sync={sync}"
    expected = ranks.run(training.train_by_hand, layout, 6, "sgd", n=2)
    found = ranks.run(training.train_by_hand, layout, 6, "hand", n=2)
    for (losses, state), (own_losses, own_state) in zip(found, expected, strict=True):
        np.testing.assert_allclose(losses, own_losses, rtol=1e-12)
        assert state.keys() == own_state.keys()
        for name, x in state.items():
            np.testing.assert_allclose(x, own_state[name], rtol=1e-12)
    assert found[0][0] != found[1][0]


def test_an_average_without_an_optimizer_stays_that_of_its_replica(ranks: Ranks) -> None:
    for errors in ranks.run(training.follow, "replica=2 sync=average(every=4)", n=2):
        assert max(errors) < 1e-12


def test_replicas_that_start_differently_are_refused(ranks: Ranks) -> None:
    for said in ranks.run(training.start_differently, "replica=2 sync=average(every=4)", n=2):
        assert said.startswith("CommError: replicas do not start from the same state")
        assert "0.weight: sha256" in said


@pytest.mark.parametrize(
    "layout",
    [
        "replica=2 sync=average(every=4, traffic=int8)",
        "replica=2 sync=diloco(every=4, fragments=2, delay=3)",
        "replica=2 sync=gossip(every=2, delay=3)",
        "replica=2 data=2 zero=1 sync=diloco(every=4, traffic=int8)",
    ],
)
def test_a_resumed_run_ends_as_one_that_never_stopped(
    ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    """Saved between rounds, with results under way where they land late; bit by bit."""
    n, path = Layout.parse(layout).num_ranks, str(tmp_path / "saved")
    expected = ranks.run(training.save_and_go_on, layout, 6, 12, path, n=n)
    for first in (0, 1):  # steps before it is loaded
        found = ranks.run(training.resume, layout, first, 12, path, n=n)
        for (losses, state), (at, _, went_on, end) in zip(expected, found, strict=True):
            assert at == 6 and went_on == losses
            assert state.keys() == end.keys()
            assert all(np.array_equal(end[name], x) for name, x in state.items())
    assert expected[0][0] != expected[-1][0]


def test_other_layouts_go_on_from_replica_0(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    ranks.run(training.save_and_go_on, "replica=2 sync=average(every=4)", 6, 6, path, n=2)
    _, expected, _, _ = ranks.run(
        training.resume, "replica=2 sync=average(every=4)", 1, 6, path, n=2
    )[0]
    for layout in ("data=2 zero=1", "replica=2 sync=diloco(every=2)"):
        for at, there, _, _ in ranks.run(training.resume, layout, 1, 6, path, n=2):
            assert at == 6
            assert training.largest_difference(there, expected) == 0


def test_pipelines_agree_place_by_place(ranks: Ranks) -> None:
    """Each pipeline rank exchanges the weights that it keeps."""
    found = ranks.run(
        training.losses_of, "replica=2 pipe=2 micro=2 sync=average(every=2)", STEPS, n=4
    )
    expected = training.reference("average(every=2)", 2, STEPS)
    for rank, losses in enumerate(found):
        np.testing.assert_allclose(losses, expected[rank // 2][0], rtol=1e-6)
