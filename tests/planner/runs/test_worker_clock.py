"""Workers of servers on a clock, against closed forms."""

from __future__ import annotations

import math

import pytest

from tutti.errors import PlanError
from tutti.planner.runs.worker_clock import play_workers


@pytest.mark.parametrize("num", [1, 2, 5])
def test_equal_workers_miss_the_updates_of_all_others(num: int) -> None:
    found = play_workers([1.0] * num, 0.0, math.inf)
    assert found.updates_per_second == pytest.approx(num)
    assert found.staleness == pytest.approx(num - 1, abs=0.1)
    assert found.waiting == pytest.approx(0.0)


def test_a_round_takes_as_long_as_its_slowest() -> None:
    found = play_workers([1.0, 3.0], 0.0, 0)
    assert found.updates_per_second == pytest.approx(2 / 3)
    assert (found.staleness, found.most) == (0, 0)
    assert found.waiting == pytest.approx(1 / 3)


def test_without_waiting_the_fast_worker_trains_more() -> None:
    slow = play_workers([1.0, 3.0], 0.0, 0).updates_per_second
    fast = play_workers([1.0, 3.0], 0.0, math.inf, num_rounds=600)
    assert fast.updates_per_second > slow
    assert fast.most >= 3


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_a_bound_holds(ahead: int) -> None:
    found = play_workers([1.0, 1.5, 4.0], 0.0, ahead)
    free = play_workers([1.0, 1.5, 4.0], 0.0, math.inf)
    assert found.most <= 2 * (ahead + 1) * 2
    assert found.updates_per_second <= free.updates_per_second + 1e-9
    assert found.updates_per_second == pytest.approx(3 / 4.0, rel=0.02)


def test_a_slow_server_bounds_all() -> None:
    found = play_workers([1.0] * 8, 0.5, math.inf)
    assert found.updates_per_second == pytest.approx(2.0, rel=0.01)
    assert found.waiting > 0.5


@pytest.mark.parametrize(
    "given", [([], 0.0, 0), ([0.0], 0.0, 0), ([1.0], -1.0, 0), ([1.0], 0.0, -1)]
)
def test_times_that_cannot_be_are_refused(given: tuple[list[float], float, float]) -> None:
    with pytest.raises(PlanError, match="seconds of compute"):
        play_workers(*given)
