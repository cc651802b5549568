"""Searches the placement of least predicted time: counts each decision alone, solves for the best subset, and
counts the programs around it.

    count none and each decision alone  ->  best_subset  ->  count it  ->  one less, one more, while it pays
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutti.planner.placement.candidate_cost import PlacedCost
from tutti.planner.placement.decisions import Decision, exclusions
from tutti.planner.placement.subset_program import best_subset

# Rounds of improvement, and the share of the time that a decision must save: it adds collectives.
_MOST_ROUNDS = 4
WORTH = 2e-3
# A decision that alone costs such a share of the time is taken to see: what changes less changes nothing
# beside others either.
_LEAST_NEAR, _MOST_NEAR = 2 * WORTH, 2e-2
Chosen = tuple[int, ...]


@dataclass(frozen=True)
class BestSubset:
    """The decisions taken, by position, their cost, the cost of none and of each alone."""

    chosen: Chosen
    cost: PlacedCost
    none: PlacedCost
    alone: tuple[PlacedCost, ...]


def search(
    given: Sequence[Decision],
    count: Callable[[Chosen], PlacedCost],
    *,
    bound_nbytes: float = math.inf,
    takes_one: bool = False,
) -> BestSubset:
    """The best subset of decisions that `count` confirms.

    A decision must save time, or memory that is needed. One that an op undoes by gathering its weight is
    none: the weight would be split between steps only.

    Args:
        given: decisions of one axis.
        count: the cost of a subset, by position; raises nothing.
        bound_nbytes: the memory of a device for state, gradients and activations.
        takes_one: take the best decision even if none pays.
    """
    none = count(())
    alone = tuple(count((i,)) for i in range(len(given)))
    taken = [i for i in range(len(given)) if not given[i].parameters & alone[i].gathered]
    gains = [alone[i].seconds - none.seconds + WORTH * none.seconds for i in taken]
    memory = [alone[i].memory_nbytes - none.memory_nbytes for i in taken]
    excluded = exclusions(given)
    among = [(taken.index(i), taken.index(j)) for i, j in excluded if i in taken and j in taken]
    room = {"used_nbytes": none.memory_nbytes, "bound_nbytes": bound_nbytes}
    first = tuple(taken[i] for i in best_subset(gains, memory, among, **room))
    around = _Around(set(excluded), count, bound_nbytes, least=int(takes_one and bool(taken)))
    starts = [first, (), *((i,) for i in taken)]
    best = min((c for c in starts if len(c) >= around.least), key=around.rank)
    hopeful = [i for i in taken if i in first or _costs_little(alone[i], none)]
    # If a sum of parts is the whole, each of them does what it does alone.
    parts = none.seconds + sum(alone[i].seconds - none.seconds for i in first)
    doubtful = taken if abs(count(first).seconds - parts) > WORTH * none.seconds else []
    for _ in range(_MOST_ROUNDS):
        better = around.better(best, hopeful, doubtful)
        if better is None:
            break
        best = better
    return BestSubset(best, count(best), none, alone)


def _costs_little(alone: PlacedCost, none: PlacedCost) -> bool:
    more = alone.seconds - none.seconds
    return _LEAST_NEAR * none.seconds < more < _MOST_NEAR * none.seconds


@dataclass(frozen=True)
class _Around:
    """Subsets near a subset, of `least` decisions or more."""

    excluded: set[tuple[int, int]]
    count: Callable[[Chosen], PlacedCost]
    bound_nbytes: float
    least: int

    def rank(self, chosen: Chosen) -> tuple[float, float]:
        """Bytes beyond the memory first, then seconds and a price for each decision."""
        cost = self.count(chosen)
        price = WORTH * len(chosen) * self.count(()).seconds
        return max(0.0, cost.memory_nbytes - self.bound_nbytes), cost.seconds + price

    def better(
        self, chosen: Chosen, hopeful: Sequence[int], doubtful: Sequence[int]
    ) -> Chosen | None:
        """The best subset without a doubtful decision, or with one more hopeful one; None without a gain."""
        near = [tuple(i for i in chosen if i != out) for out in chosen if out in doubtful]
        near += [self._with(chosen, i) for i in hopeful if i not in chosen]
        near = [c for c in near if len(c) >= self.least]
        best = min(near, key=self.rank, default=chosen)
        return best if self.rank(best) < self.rank(chosen) else None

    def _with(self, chosen: Chosen, new: int) -> Chosen:
        kept = (
            i for i in chosen if (i, new) not in self.excluded and (new, i) not in self.excluded
        )
        return tuple(sorted((*kept, new)))
