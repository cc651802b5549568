"""Whether to split the outputs of norms by tokens, and which decisions then pay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tutti.planner.placement.axis_search import Search
from tutti.planner.placement.candidate_cost import Costing, PlacedCost
from tutti.planner.placement.decisions import place_of, splits_of
from tutti.planner.placement.search import WORTH
from tutti.planner.placement.token_splits import token_splits


def with_tokens_split(
    costing: Costing, search: Search, *, bound_nbytes: float = math.inf
) -> tuple[Search, dict[str, str]]:
    """The search with the decisions that pay beside split tokens, and the entries that split these.

    Without decisions, or if split tokens save neither time nor memory, the search stays, without entries.

    Args:
        costing: counts the costs.
        search: over `tensor`, the last axis.
        bound_nbytes: the memory of a device.
    """
    axis = search.axis
    tokens = token_splits(costing.step, axis, costing.layout.axes[axis])
    if not tokens or not search.found.chosen:
        return search, {}

    def counted(one: Search, tokens: dict[str, str]) -> PlacedCost:
        return costing.of(place_of(one.splits, costing.num_dims) | tokens)

    def sent(one: Search) -> float:
        return counted(one, tokens).sent_nbytes

    def rank(one: Search, tokens: dict[str, str]) -> tuple[float, float]:
        cost = counted(one, tokens)
        return max(0.0, cost.memory_nbytes - bound_nbytes), cost.seconds * (
            1 + WORTH * bool(tokens)
        )

    # Without split tokens a decision may pay only because it splits what nothing else does, such as logits
    # of a vocabulary that does not divide.
    best = min((search, *_exchanged(search)), key=lambda one: rank(one, tokens))
    if not rank(best, tokens) < rank(search, {}):
        return search, {}
    search = best
    for more in _open(search):
        wider = _with(search, more)
        (over, seconds), before = rank(wider, tokens), rank(search, tokens)
        moves_less = sent(wider) < sent(search) and (over, seconds) <= before
        if moves_less or (over, seconds * (1 + WORTH)) < before:
            search = wider
    return search, tokens


def _exchanged(search: Search) -> Iterator[Search]:
    """The search with the decisions that one taken excludes, in place of this one."""
    given, taken = search.given, search.found.chosen
    for out in taken:
        made = _without(search, out)
        for new in (i for i, one in enumerate(given) if i != out and one.excludes(given[out])):
            if new in _open(made):
                made = _with(made, new)
        if len(made.found.chosen) >= len(taken):
            yield made


def _open(search: Search) -> list[int]:
    """The decisions that were not taken, exclude none of those taken, and leave their weights in place."""
    taken = [search.given[i] for i in search.found.chosen]
    return [
        i
        for i, one in enumerate(search.given)
        if i not in search.found.chosen
        and not any(one.excludes(other) for other in taken)
        and not one.parameters & search.found.alone[i].gathered
    ]


def _with(search: Search, more: int) -> Search:
    chosen = tuple(sorted((*search.found.chosen, more)))
    splits = splits_of([search.given[more]], search.axis, search.splits)
    return replace(search, found=replace(search.found, chosen=chosen), splits=splits)


def _without(search: Search, out: int) -> Search:
    chosen = tuple(i for i in search.found.chosen if i != out)
    splits = dict(search.splits)
    for dim in search.given[out].dims:
        splits[dim] = tuple(a for a in splits[dim] if a != search.axis)
    splits = {dim: axes for dim, axes in splits.items() if axes}
    return replace(search, found=replace(search.found, chosen=chosen), splits=splits)
