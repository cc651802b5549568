"""The search over decisions, by costs made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tutti.planner.placement.candidate_cost import PlacedCost
from tutti.planner.placement.search import Chosen, search


@pytest.mark.parametrize(("takes_one", "chosen"), [(False, ()), (True, (1,))])
def test_a_search_that_must_take_one_takes_the_best(takes_one: bool, chosen: Chosen) -> None:
    """All that is split costs more time: experts are apart all the same."""
    seconds = {(): 1.0, (0,): 1.5, (1,): 1.2, (0, 1): 1.4}
    given: Any = [SimpleNamespace(parameters={n}, excludes=lambda _: False) for n in "ab"]

    def count(some: Chosen) -> PlacedCost:
        return PlacedCost(seconds=seconds[some], sent_nbytes=0, memory_nbytes=0)

    assert search(given, count, takes_one=takes_one).chosen == chosen


def searched(seconds: dict[Chosen, float]) -> Chosen:
    given: Any = [SimpleNamespace(parameters={n}, excludes=lambda _: False) for n in "ab"]
    return search(given, lambda some: PlacedCost(seconds[some], 0, 0)).chosen


def test_a_decision_that_gains_alone_is_left_out_beside_another() -> None:
    """As norms of heads split along their dim, beside heads that are split already."""
    assert searched({(): 1.0, (0,): 0.4, (1,): 0.9, (0, 1): 0.5}) == (0,)


def test_decisions_that_pay_only_together_are_taken() -> None:
    """As attention and feed-forward of one layer that share their all-reduce."""
    assert searched({(): 1.0, (0,): 1.01, (1,): 0.95, (0, 1): 0.8}) == (0, 1)
