"""The mixed-integer program against every subset."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from tutti.planner.placement.op_runs import Stretch, runs_of
from tutti.planner.placement.patterns import patterns_of
from tutti.planner.placement.subset_program import best_subset


def by_hand(
    gains: list[float], memory: list[float], excluded: set[tuple[int, int]], room: float
) -> float:
    """The least time of all subsets that fit; inf if none does."""
    best = math.inf
    for size in range(len(gains) + 1):
        for chosen in combinations(range(len(gains)), size):
            apart = not any(pair in excluded for pair in combinations(chosen, 2))
            if apart and sum(memory[i] for i in chosen) <= room:
                best = min(best, sum(gains[i] for i in chosen))
    return best


@pytest.mark.parametrize("seed", range(30))
def test_the_best_of_all_subsets(seed: int) -> None:
    source = random.Random(seed)
    num = source.randint(1, 8)
    gains = [source.uniform(-5, 3) * 1e-6 for _ in range(num)]
    memory = [-source.uniform(0, 9) * 1e6 for _ in range(num)]
    excluded = {p for p in combinations(range(num), 2) if source.random() < 0.3}
    room = -source.uniform(0, 8) * 1e6
    chosen = best_subset(gains, memory, sorted(excluded), used_nbytes=1e7, bound_nbytes=1e7 + room)
    assert not any(pair in excluded for pair in combinations(chosen, 2))
    wanted = by_hand(gains, memory, excluded, room)
    if math.isfinite(wanted):
        assert sum(memory[i] for i in chosen) <= room + 1.0
        assert sum(gains[i] for i in chosen) == pytest.approx(wanted, abs=1e-12)


def test_too_little_memory_is_exceeded_by_the_least() -> None:
    assert best_subset([5.0, 1.0], [-2.0, -1.0], [(0, 1)], used_nbytes=9.0, bound_nbytes=1.0) == (
        0,
    )


def test_runs_of_equal_stretches() -> None:
    layer = list(range(10, 22))
    assert runs_of([1, 2, *layer * 4, 3]) == [Stretch(2, 12, 50)]
    assert runs_of(list(range(40))) == []


def test_patterns_cover_their_parameters_alone() -> None:
    names = [f"h.{i}.{part}.weight" for i in range(3) for part in ("a.out", "out", "in")]
    texts = {n: "tensor, -" if ".a." in n else "-, tensor" for n in names if "in" not in n}
    assert patterns_of(texts, names) == {
        "h.*.a.out.weight": "tensor, -",
        "h.*.out.weight": "-, tensor",
    }
    one = {"h.0.in.weight": "tensor, -"}
    assert patterns_of(one, names) == one
