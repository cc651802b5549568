"""Goodput under failures, against runs drawn at random, and the best interval against all others."""

from __future__ import annotations

import math
import random

import pytest

from tutti.errors import PlanError
from tutti.planner.runs.goodput import Reliability

HOUR = 3600.0


def drawn(one: Reliability, interval: float, seconds: float, seed: int) -> float:
    """The share of a drawn run that is in a checkpoint at its end."""
    chance = random.Random(seed)
    now = done = 0.0
    failure = chance.expovariate(1 / one.mean_seconds)
    while now < seconds:
        if failure > now + interval + one.save:
            now += interval + one.save
            done += interval
            continue
        now = failure
        while True:  # a restart may fail, too
            failure = now + chance.expovariate(1 / one.mean_seconds)
            if failure > now + one.restart:
                now += one.restart
                break
            now = failure
    return done / now


@pytest.mark.parametrize("interval", [300.0, 1800.0, 7200.0])
@pytest.mark.parametrize(("save", "restart"), [(60.0, 0.0), (60.0, 600.0), (5.0, 120.0)])
def test_goodput_is_that_of_drawn_runs(interval: float, save: float, restart: float) -> None:
    one = Reliability(num_devices=1000, mtbf=3000 * HOUR, save=save, restart=restart)
    mean = sum(drawn(one, interval, 4000 * HOUR, seed) for seed in range(3)) / 3
    assert one.goodput(interval) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(("interval", "restart"), [(53.5, 300.0), (53.5, 90.0), (200.0, 300.0)])
def test_failures_during_restarts_count(interval: float, restart: float) -> None:
    """A restart that takes longer than the time between failures begins many times."""
    one = Reliability(num_devices=1, mtbf=180.0, save=10.0, restart=restart)
    mean = sum(drawn(one, interval, 400 * HOUR, seed) for seed in range(5)) / 5
    closed = interval / (180 * math.exp(restart / 180) * (math.exp((interval + 10) / 180) - 1))
    assert one.goodput(interval) == pytest.approx(closed)
    assert one.goodput(interval) == pytest.approx(mean, rel=0.03)


def test_a_restart_does_not_change_the_best_interval() -> None:
    one, other = (Reliability(1, 180.0, 10.0, restart) for restart in (0.0, 1e6))
    assert one.best_interval() == pytest.approx(other.best_interval())
    assert other.goodput(one.best_interval()) == 0.0


@pytest.mark.parametrize("save", [1.0, 30.0, 600.0])
def test_no_other_interval_is_better(save: float) -> None:
    one = Reliability(num_devices=16384, mtbf=50_000 * HOUR, save=save, restart=300.0)
    best = one.best_interval()
    assert all(one.goodput(best) >= one.goodput(best * f) - 1e-9 for f in (0.5, 0.8, 1.25, 2.0))
    young = (2 * save * one.mean_seconds) ** 0.5
    assert best == pytest.approx(young, rel=0.35)


def test_a_free_checkpoint_is_best_at_once() -> None:
    assert Reliability(8, HOUR, 0.0, 1.0).best_interval() == 0.0


def test_hopeless_runs_have_no_goodput() -> None:
    assert Reliability(100_000, HOUR, 600.0, 600.0).goodput(HOUR) == 0.0


@pytest.mark.parametrize(
    "figures", [(0, 1.0, 1.0, 1.0), (1, -1.0, 1.0, 1.0), (1, 1.0, float("inf"), 0.0)]
)
def test_figures_that_cannot_be_are_refused(figures: tuple[int, float, float, float]) -> None:
    with pytest.raises(PlanError, match="is not a time"):
        Reliability(*figures)
