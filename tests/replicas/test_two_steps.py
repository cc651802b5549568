"""Two steps over one model under replicas: each exchanges the weights that it trains, at its own rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import two_step_replicas as training
from ranks import Ranks
from tutti.layout import Layout

CALLS = "0010110101001101"


def check(ranks: Ranks, layout: str, kind: str) -> None:
    laid_out = Layout.parse(layout)
    n, count = laid_out.num_ranks, laid_out.num_replicas
    found = ranks.run(training.train, layout, kind, CALLS, n=n)
    expected = training.simulate(laid_out.sync, kind, CALLS, count)
    for rank, states in enumerate(found):
        assert not isinstance(states, str), states
        for state, wanted in zip(states, expected, strict=True):
            for name, x in wanted[rank * count // n].items():
                np.testing.assert_allclose(state[name], x.numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "layout",
    [
        "replica=2 sync=average(every=3)",
        "replica=2 sync=diloco(every=3)",
        "replica=2 sync=diloco(every=3, delay=1)",
        "replica=2 data=2 zero=3 sync=diloco(every=3, delay=1)",
    ],
)
def test_steps_of_disjoint_weights_have_rounds_of_their_own(ranks: Ranks, layout: str) -> None:
    check(ranks, layout, "pair")


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["head", "shared"])
def test_two_steps_average_the_weights_that_both_train(ranks: Ranks, kind: str, every: int) -> None:
    check(ranks, f"replica=2 sync=average(every={every})", kind)


@pytest.mark.parametrize(
    ("sync", "calls"),
    [
        ("diloco(every=3)", "01"),
        ("diloco(every=1)", "010"),  # after a round both begin with the same values
        ("diloco(every=3)", "00010"),
        ("average(every=3, traffic=int8)", "01"),
        ("gossip()", "010"),
        ("elastic()", "01"),
    ],
)
def test_a_weight_of_two_steps_is_refused_where_the_strategy_keeps_state(
    ranks: Ranks, sync: str, calls: str
) -> None:
    for said in ranks.run(training.train, f"replica=2 sync={sync}", "head", calls, n=2):
        assert isinstance(said, str) and said.startswith("LayoutError: two steps train ")
        assert '"3.weight"' in said and "fit_step" in said and "shrink_step" in said


@pytest.mark.parametrize("sync", ["diloco(every=3)", "average(every=3, traffic=int8)"])
def test_a_step_may_follow_another_after_a_round(ranks: Ranks, sync: str) -> None:
    found = ranks.run(training.train, f"replica=2 sync={sync}", "head", "000111", n=2)
    assert not any(isinstance(states, str) for states in found), found
    for name in ("3.weight", "3.bias"):
        assert np.array_equal(found[0][-1][name], found[1][-1][name])


@pytest.mark.parametrize(
    ("sync", "kind"),
    [
        ("diloco(every=3, delay=1)", "pair"),
        ("average(every=3)", "shared"),
        ("gossip(every=2)", "pair"),
    ],
)
@pytest.mark.parametrize("saved", [7, 10])
def test_two_steps_resume_exactly(
    ranks: Ranks, tmp_path: Path, sync: str, kind: str, saved: int
) -> None:
    given = (f"replica=2 sync={sync}", kind, CALLS, str(tmp_path / "saved"), saved)
    whole, rest = ranks.run(training.train, *given, n=2), ranks.run(training.train, *given, n=2)
    for one, other in zip(whole, rest, strict=True):
        assert not isinstance(one, str) and not isinstance(other, str), (one, other)
        assert len(other) == len(CALLS) - saved
        hidden = {"0": "optim", "1": "1.optim"}  # before a step's first call: slots of replica 0
        for k, (state, wanted) in enumerate(zip(other, one[saved:], strict=True), saved):
            hidden.pop(CALLS[k], None)
            shown = {n: x for n, x in state.items() if not n.startswith(tuple(hidden.values()))}
            assert [n for n, x in shown.items() if not np.array_equal(wanted[n], x)] == []
        assert other[-1].keys() == one[-1].keys()


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_each_replica_resumes_from_its_own_weights_whichever_step_comes_first(
    ranks: Ranks, tmp_path: Path, alone: int, first: int
) -> None:
    """One step alone has loaded its checkpoint."""
    layout, path = "replica=2 sync=average(every=4)", str(tmp_path / "saved")
    saved = [
        states[-1] for states in ranks.run(training.train, layout, "simple", "01", path, 2, n=2)
    ]
    assert not np.array_equal(saved[0]["3.weight"], saved[1]["3.weight"])
    given = (layout, f"{path}/{alone}", alone, first, saved)
    for there, expected in ranks.run(training.load_one, *given, n=2):
        for name, x in expected.items():
            np.testing.assert_allclose(there[name], x, rtol=0, atol=1e-12)


def test_a_change_on_one_rank_before_the_first_step_is_refused(ranks: Ranks) -> None:
    for said in ranks.run(training.change_alone, "replica=2 sync=average(every=3)", n=2):
        assert said.startswith("CommError: replicas do not start from the same state")
        assert "3.weight" in said
