"""The search over one axis, after those over other axes."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from tutti.planner.placement.candidate_cost import Costing, PlacedCost
from tutti.planner.placement.decisions import Decision, Splits, decisions, place_of, splits_of
from tutti.planner.placement.dim_groups import DimGroup, dim_groups
from tutti.planner.placement.search import BestSubset, Chosen, search

# Stacked experts are dim 0 of a weight with at least this many dims.
_STACKED = 3


@dataclass(frozen=True)
class Search:
    """What a search over one axis had to decide, and what it found.

    splits: of all parameters of the reduced step, those of earlier axes too.
    """

    axis: str
    given: tuple[Decision, ...]
    found: BestSubset
    splits: Splits

    @property
    def chosen(self) -> list[tuple[Decision, PlacedCost]]:
        """The decisions taken, each with its cost alone."""
        return [(self.given[i], self.found.alone[i]) for i in self.found.chosen]


def search_axis(
    costing: Costing,
    axis: str,
    before: Splits,
    fixed: Collection[str],
    *,
    bound_nbytes: float = math.inf,
) -> Search:
    """The best splits over `axis`.

    An axis `expert` splits the experts, even where whole experts would be faster.

    Args:
        costing: counts the costs.
        axis: of the layout.
        before: splits over other axes, which stay; fixed: parameters that stay as they are.
        bound_nbytes: the memory of a device.
    """
    groups = dim_groups(costing.step, costing.layout.axes[axis])
    if axis == "expert":
        groups = [g for g in groups if _is_stacked(g, costing)]
    given = [d for d in decisions(groups, fixed) if _divides(d, before, costing, axis)]

    def count(chosen: Chosen) -> PlacedCost:
        splits = splits_of([given[i] for i in chosen], axis, before)
        return costing.of(place_of(splits, costing.num_dims))

    found = search(given, count, bound_nbytes=bound_nbytes, takes_one=axis == "expert")
    splits = splits_of([given[i] for i in found.chosen], axis, before)
    return Search(axis, tuple(given), found, splits)


def _is_stacked(group: DimGroup, costing: Costing) -> bool:
    return any(d == 0 and costing.num_dims[name] >= _STACKED for name, d in group.dims)


def _divides(decision: Decision, before: Splits, costing: Costing, axis: str) -> bool:
    """Whether each dim divides by its axes of before and by this one."""
    sizes = costing.layout.axes
    for name, dim in decision.dims:
        ways = sizes[axis] * math.prod(sizes[a] for a in before.get((name, dim), ()))
        if costing.weights[name].shape[dim] % ways:
            return False
    return True
