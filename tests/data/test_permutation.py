"""A permutation computed position by position is one, and looks random."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2

from tutti.data.permutation import key_of, permuted


@pytest.mark.parametrize("first", range(0, 1100, 100))
def test_it_is_a_permutation_of_every_small_range(first: int) -> None:
    for size in range(first, first + 100):
        positions = np.arange(size, dtype=np.int64)
        assert np.array_equal(np.sort(permuted(positions, size, 7)), positions)


def test_it_is_a_permutation_of_a_large_range() -> None:
    size = 3_000_017
    found = permuted(np.arange(size, dtype=np.int64), size, 1)
    assert np.bincount(found, minlength=size).max() == 1


def test_positions_are_computed_one_by_one() -> None:
    size = 10**12 + 39
    positions = np.array([0, 5, 10**9, size - 1])
    together = permuted(positions, size, 3)
    alone = [permuted(positions[i : i + 1], size, 3)[0] for i in range(4)]
    assert together.tolist() == alone and together.min() >= 0 and together.max() < size


def p_value(counts: np.ndarray) -> float:
    """Of the chi-square test that all cells are equally likely."""
    expected = counts.sum() / counts.size
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), counts.size - 1))


@pytest.mark.parametrize("size", [3, 5, 16, 23])
def test_every_sample_is_as_likely_at_every_position(size: int) -> None:
    counts = np.zeros((size, size))
    positions = np.arange(size)
    expected = 10
    for seed in range(expected * size):
        counts[positions, permuted(positions, size, key_of("order", seed))] += 1
    # Rows and columns have fixed sums, so that there are fewer degrees of freedom.
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert 1e-4 < chi2.sf(statistic, (size - 1) ** 2) < 1 - 1e-4


@pytest.mark.parametrize("size", [3, 13])
def test_pairs_of_neighbors_are_as_likely(size: int) -> None:
    counts = np.zeros((size, size))
    for seed in range(10 * size * (size - 1)):
        one, other = permuted(np.arange(2), size, key_of("order", seed))
        counts[one, other] += 1
    assert counts.diagonal().sum() == 0
    pairs = counts[~np.eye(size, dtype=bool)]
    assert 1e-4 < p_value(pairs) < 1 - 1e-4


def test_all_orders_of_four_are_as_likely() -> None:
    orders: dict[tuple[int, ...], int] = {}
    for seed in range(24 * 10):
        order = tuple(permuted(np.arange(4), 4, key_of("order", seed)).tolist())
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 24 and 1e-4 < p_value(np.array([*orders.values()], float)) < 1 - 1e-4


def test_another_key_gives_another_order() -> None:
    positions = np.arange(1000)
    same = (permuted(positions, 1000, 1) == permuted(positions, 1000, 2)).sum()
    assert same < 10
