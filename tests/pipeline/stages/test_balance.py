"""Contiguous pieces in stages, against every other way to divide them."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from tutti.pipeline.schedule.schedules import schedule
from tutti.pipeline.stages.balance import balanced, division_cost, micro_batch_seconds
from tutti.planner.simulator import simulate


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_is_faster(seed: int) -> None:
    source = random.Random(seed)
    number = source.randint(1, 8)
    times = [source.random() for _ in range(number)]
    moving = [source.choice([0.0, 0.1, 2.0]) for _ in range(number - 1)]
    for count in range(1, number + 1):
        stages = balanced(times, moving, count)
        assert stages == sorted(stages)
        assert set(stages) == set(range(count))
        own = [i for i, (a, b) in enumerate(pairwise(stages), 1) if a < b]
        ways = combinations(range(1, number), count - 1)
        best = min(seconds(times, moving, cuts) for cuts in ways)
        assert best <= seconds(times, moving, own) <= best * (1 + 1.1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_none_as_fast_is_more_even(seed: int) -> None:
    """One piece that takes as long as several others: many divisions are as fast."""
    source = random.Random(seed)
    number = source.randint(3, 9)
    times = [source.uniform(0.5, 1.0) for _ in range(number)]
    times[source.randrange(number)] = source.uniform(1.0, 4.0)
    moving = [source.choice([0.0, 0.1])] * (number - 1)
    for count in range(2, number + 1):
        stages = balanced(times, moving, count)
        own = tuple(i for i, (a, b) in enumerate(pairwise(stages), 1) if a < b)
        ways = list(combinations(range(1, number), count - 1))
        best = min(seconds(times, moving, cuts) for cuts in ways)
        fast = [cuts for cuts in ways if seconds(times, moving, cuts) <= best * (1 + 1e-9)]
        least = min(squares(times, cuts) for cuts in fast)
        assert squares(times, own) <= least * (1 + 1e-3)


def test_pieces_beside_a_long_one_are_shared_evenly() -> None:
    assert balanced([1.0] * 6 + [6.0], [0.0] * 6, 4) == [0, 0, 1, 1, 2, 2, 3]
    assert balanced([6.0] + [1.0] * 6, [0.1] * 6, 3) == [0, 1, 1, 1, 2, 2, 2]


def test_pieces_beside_a_long_one_are_cut_where_messages_are_short() -> None:
    """An even cut would save no time, and send four times the bytes."""
    assert balanced([1.0] * 6 + [6.0], [0.01, 0.04] * 3, 3) == [0, 0, 0, 1, 1, 1, 2]
    assert balanced([1.0] * 6 + [6.0], [0.04, 0.04, 0.04, 0.01, 0.04, 0.04], 3) == [
        0,
        0,
        0,
        0,
        1,
        1,
        2,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_costs_much_less(seed: int) -> None:
    source = random.Random(seed)
    number = source.randint(3, 9)
    times = [source.uniform(0.5, 1.0) for _ in range(number)]
    times[source.randrange(number)] = source.uniform(1.0, 4.0)
    moving = [source.choice([0.0, 0.01, 0.1]) for _ in range(number - 1)]
    for count in range(2, number + 1):
        stages = balanced(times, moving, count)
        own = tuple(i for i, (a, b) in enumerate(pairwise(stages), 1) if a < b)
        ways = combinations(range(1, number), count - 1)
        best = min(cost(times, moving, cuts) for cuts in ways)
        assert cost(times, moving, own) <= best * (1 + 2e-3)


def test_no_stage_is_without_work() -> None:
    assert balanced([0.0, 1.0, 1.0, 0.0], [0.0, 9.0, 0.0], 2) == [0, 0, 1, 1]
    assert balanced([0.0, 0.0, 1.0], [0.0, 0.0], 3) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(10))
def test_a_long_1f1b_takes_these_seconds_a_micro_batch(seed: int) -> None:
    """Forward and backward of stages and messages at random: no fewer seconds, and a few percent more."""
    source = random.Random(seed)
    count, few, many = source.randint(2, 5), 64, 192
    forward = [source.uniform(0.5, 1.0) for _ in range(count)]
    backward = [source.uniform(1.0, 2.0) for _ in range(count)]
    moving = [source.choice([0.0, 0.1, 1.0, 3.0]) for _ in range(count - 1)]
    costs = {(s, k): x for k, xs in (("F", forward), ("B", backward)) for s, x in enumerate(xs)}
    transfers = {(s, s + 1): x / 2 for s, x in enumerate(moving)}
    short, long = (
        simulate(schedule("1f1b", count, n), costs, transfer_seconds=transfers).seconds
        for n in (few, many)
    )
    stages = [f + b for f, b in zip(forward, backward, strict=True)]
    expected = micro_batch_seconds(stages, moving)
    assert 0.99 * expected <= (long - short) / (many - few) <= 1.3 * expected


def squares(times: list[float], cuts: list[int] | tuple[int, ...]) -> float:
    """The sum of the squares of stages' seconds."""
    return sum(sum(times[a:b]) ** 2 for a, b in pairwise([0, *cuts, len(times)]))


def cost(times: list[float], moving: list[float], cuts: tuple[int, ...]) -> float:
    """Of stages that begin at 0 and at each cut."""
    bounds = [0, *cuts, len(times)]
    stages = [sum(times[a:b]) for a, b in pairwise(bounds)]
    return division_cost(stages, [moving[b - 1] for b in bounds[1:-1]])


def seconds(times: list[float], moving: list[float], cuts: list[int] | tuple[int, ...]) -> float:
    """Of a micro-batch, with stages that begin at 0 and at each cut."""
    bounds = [0, *cuts, len(times)]
    stages = [sum(times[a:b]) for a, b in pairwise(bounds)]
    return micro_batch_seconds(stages, [moving[b - 1] for b in bounds[1:-1]])
