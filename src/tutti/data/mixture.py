"""Several datasets in turn, by weights: a low-discrepancy order, computed position by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.data.sample_order import SampleNumbers, SampleOrder, one_pass
from tutti.errors import TuttiError

# Turns repeat after at most so many samples: weights of a larger common denominator are rounded to it.
LONGEST_PERIOD = 10_000


@dataclass(frozen=True)
class Turns:
    """One period: the dataset of each turn, the number of its turns before that one, and in a period."""

    datasets: NDArray[np.int64]
    before: NDArray[np.int64]
    counts: NDArray[np.int64]


class Mixture(SampleOrder):
    """Samples of several datasets; an epoch has as many as all of them together.

    Each dataset goes on through its own passes, from one epoch to the next: one with a large weight is passed
    more often, and each pass has a permutation of its own.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        size = sum(sizes)
        size -= size % batch_size if drop_last else 0  # the next epoch goes on with the rest
        super().__init__(size, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.sizes, self._turns = list(sizes), turns(period_counts(weights))

    def samples(self, epoch: int, start: int, stop: int) -> SampleNumbers:
        first = epoch * self.size
        periods, turn = np.divmod(np.arange(first + start, first + stop), len(self._turns.datasets))
        datasets = self._turns.datasets[turn]
        drawn = periods * self._turns.counts[datasets] + self._turns.before[turn]
        numbers = np.empty_like(drawn)
        for k in np.unique(datasets).tolist():
            passes, position = np.divmod(drawn, self.sizes[k])
            for p in np.unique(passes[datasets == k]).tolist():
                chosen = (datasets == k) & (passes == p)
                numbers[chosen] = self._pass(position[chosen], k, p)
        return SampleNumbers(numbers, datasets)

    def _pass(self, positions: NDArray[np.int64], dataset: int, number: int) -> NDArray[np.int64]:
        shuffle, seed = self.shuffle, self.seed
        size = self.sizes[dataset]
        return one_pass(positions, size, number, shuffle=shuffle, seed=seed, dataset=dataset)


def period_counts(weights: Sequence[float]) -> list[int]:
    """The turns of each dataset in one period, in the ratio of the weights."""
    shares = [Fraction(w).limit_denominator(10**6) for w in weights]
    shares = [s / sum(shares) for s in shares]
    period = math.lcm(*(s.denominator for s in shares))
    if period <= LONGEST_PERIOD:
        return [int(s * period) for s in shares]
    counts = [max(1, int(s * LONGEST_PERIOD)) for s in shares]
    lacking = [s * LONGEST_PERIOD - c for s, c in zip(shares, counts, strict=True)]
    while sum(counts) < LONGEST_PERIOD:
        k = max(range(len(counts)), key=lacking.__getitem__)
        counts[k] += 1
        lacking[k] -= 1
    return counts


def turns(counts: Sequence[int]) -> Turns:
    """The turns of a period: after any number of them, each dataset has had its share, up to less than 1.

    Of `K` datasets with shares `a`, those that are `1 / (2K - 2)` behind or more may have turn `j`; the one
    that must have it first gets it (R. Tijdeman, "The chairman assignment problem", 1980). No dataset is then
    more than `1 - 1 / (2K - 2)` of a sample away from `a j`. Here all numbers are times `period (2K - 2)`.
    """
    period, num = sum(counts), len(counts)
    parts = max(1, 2 * num - 2)
    had = [0] * num
    datasets, before = [], []
    for j in range(1, period + 1):
        lag = [parts * (a * j - period * h) for a, h in zip(counts, had, strict=True)]
        due = [k for k in range(num) if lag[k] >= period]
        k = min(due, key=lambda i: (Fraction(period * (parts - 1) - lag[i], counts[i]), i))
        datasets.append(k)
        before.append(had[k])
        had[k] += 1
    return Turns(np.array(datasets), np.array(before), np.array(counts))


def check_weights(datasets: Any, weights: Any) -> None:
    """Raise `TuttiError` unless there is a positive weight for each of several datasets."""
    fix = "one weight above 0 for each dataset: tutti.loader([a, b], weights=[0.9, 0.1])"
    if not isinstance(datasets, list | tuple) or not datasets:
        raise TuttiError(
            f"weights= are those of several datasets, but the dataset is a {type(datasets).__name__}",
            fix=fix,
        )
    if len(weights) != len(datasets):
        raise TuttiError(f"{len(weights)} weights for {len(datasets)} datasets", fix=fix)
    for k, weight in enumerate(weights):
        if not isinstance(weight, Real) or not 0 < float(weight) < math.inf:
            raise TuttiError(f"the weight of dataset {k} is {weight!r}", fix=fix)
