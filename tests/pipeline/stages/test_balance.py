"""Contiguous pieces in stages, against every other way to divide them."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from tutti.pipeline.stages.balance import balanced


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_has_a_faster_slowest_stage(seed: int) -> None:
    source = random.Random(seed)
    number = source.randint(1, 8)
    times = [source.random() for _ in range(number)]
    sending = [source.choice([0.0, 0.1, 2.0]) for _ in range(number - 1)]
    for count in range(1, number + 1):
        stages = balanced(times, sending, count)
        assert stages == sorted(stages)
        assert set(stages) == set(range(count))
        own = [i for i, (a, b) in enumerate(pairwise(stages), 1) if a < b]
        ways = combinations(range(1, number), count - 1)
        best = min(slowest(times, sending, cuts) for cuts in ways)
        assert slowest(times, sending, own) == pytest.approx(best)


def test_no_stage_is_without_work() -> None:
    assert balanced([0.0, 1.0, 1.0, 0.0], [0.0, 9.0, 0.0], 2) == [0, 0, 1, 1]


def slowest(times: list[float], sending: list[float], cuts: list[int] | tuple[int, ...]) -> float:
    """Of stages that begin at 0 and at each cut."""
    bounds = [0, *cuts, len(times)]
    ends = [*sending, 0.0]
    return max(sum(times[a:b]) + ends[b - 1] for a, b in pairwise(bounds))
