"""How much regret the noise of the published profiles alone would cause.

A row of one host adds up the profile of one layer, taken once for each (width, tensor, micro-batch). Let the
host's speed differ from profile to profile, and all else be as predicted: the layout predicted to be the
fastest is right in the mean, and still not the fastest of the noisy rows.

    time of a row  =  predicted, with the host's time of an op times exp(spread * normal draw of its profile)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.published_iterations import Iteration

# The standard deviation of the host's speed over profiles whose layers wait for it: measured_clusters.md.
HOST_SPREAD = 0.11
_DRAWS = 1000
# Standard deviations at which rows are predicted; between them times are linear.
_GRID = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)


@dataclass(frozen=True)
class NoiseRegret:
    """Regrets, averaged over draws: the mean over problems and the worst.

    share_above: of the draws, those with a mean regret of at least the one asked about.
    """

    mean: float
    worst: float
    share_above: float


def noise_regret(
    rows: Sequence[Iteration],
    times_at: Callable[[float], Sequence[float]],
    regrets: Callable[[Sequence[Iteration], Sequence[float], Sequence[float]], Sequence[float]],
    found: float,
    *,
    spread: float = HOST_SPREAD,
    draws: int = _DRAWS,
) -> NoiseRegret:
    """The regret of a model that is right but for the host's speed of each profile.

    Args:
        rows: published iterations.
        times_at: milliseconds of every row, with the host's time times this factor.
        regrets: of rows, predicted and measured times.
        found: a mean regret to compare with.
        spread: standard deviation of the logarithm of the host's time.
        draws: of all profiles.
    """
    grid = [times_at(math.exp(spread * x)) for x in _GRID]
    middle = grid[_GRID.index(0.0)]
    random_numbers = random.Random(0)
    means, worsts = [], []
    for _ in range(draws):
        drawn: dict[tuple[int, int, int], float] = {}
        noisy = []
        for i, row in enumerate(rows):
            key = row.width, row.tensor, row.micro_batch
            if row.on_one_host and key not in drawn:
                drawn[key] = max(_GRID[0], min(_GRID[-1], random_numbers.gauss(0, 1)))
            at = drawn[key] if row.on_one_host else 0.0
            noisy.append(_between([times[i] for times in grid], at))
        lost = regrets(rows, middle, noisy)
        means.append(sum(lost) / len(lost))
        worsts.append(max(lost))
    above = sum(m >= found for m in means) / draws
    return NoiseRegret(sum(means) / draws, sum(worsts) / draws, above)


def _between(values: Sequence[float], at: float) -> float:
    """The value of a piecewise linear function on the grid."""
    low = min(len(_GRID) - 2, int(at - _GRID[0]))
    part = at - _GRID[low]
    return values[low] + part * (values[low + 1] - values[low])
