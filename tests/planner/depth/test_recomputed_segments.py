"""Segments of pieces against all cuts."""

from __future__ import annotations

import random
from itertools import chain, combinations, pairwise

import pytest

from tutti.planner.depth.recomputed_segments import segments_of


def least_held(inside: list[float], across: list[float]) -> float:
    """The fewest bytes held at once, of all choices of cuts."""
    places = range(1, len(inside))
    every = chain.from_iterable(combinations(places, n) for n in range(len(inside)))
    return min(held(inside, across, cuts) for cuts in every)


def held(inside: list[float], across: list[float], cuts: tuple[int, ...]) -> float:
    kept, most = 0.0, 0.0
    for begin, end in pairwise([0, *cuts, len(inside)]):
        most = max(most, kept + sum(inside[begin:end]))
        kept += across[end - 1] if end < len(inside) else 0.0
    return max(most, kept)


@pytest.mark.parametrize("seed", range(20))
def test_segments_hold_little_more_than_the_best_cuts(seed: int) -> None:
    draw = random.Random(seed)
    inside = [draw.choice([1.0, 2.0, 4.0, 9.0]) for _ in range(9)]
    across = [draw.choice([0.25, 0.25, 1.0, 3.0]) for _ in range(8)]
    found = segments_of(tuple(inside), tuple(across))
    assert found.crossing + found.above <= 1.35 * least_held(inside, across)


def test_equal_layers_follow_the_square_root() -> None:
    found = segments_of((16.0,) * 64, (1.0,) * 63)
    assert found.crossing + found.above == pytest.approx(
        2 * 32, rel=0.1
    )  # 32 segments: 31 cuts, 2 layers
    assert found.last == pytest.approx(62, abs=1)


def test_cuts_are_where_few_bytes_cross() -> None:
    found = segments_of((4.0,) * 8, (9.0, 1.0) * 3 + (9.0,))
    assert found.crossing == 3.0


def test_one_piece_is_one_segment() -> None:
    found = segments_of((5.0,), ())
    assert (found.crossing, found.above, found.last) == (0.0, 5.0, 0)
