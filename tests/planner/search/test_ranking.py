"""The order of layouts, what fits, and what a plan says if nothing does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tutti.errors import PlanError, ShardingError
from tutti.layout import Layout
from tutti.planner.estimates.layout_estimate import Estimate
from tutti.planner.search.ranking import Ranking, Refinement, close_to_best, first_pipelines, ranked
from tutti.propagate.idle_axes import IdleAxisError

TABLE = {
    "data=2": (2.0, 50),
    "data=2 zero=3": (3.0, 20),
    "pipe=2 micro=2": (1.0, 90),
    "": (5.0, 80),
}


def estimated(layout: Layout) -> Estimate:
    if layout.axes.get("tensor", 1) > 1:
        raise ShardingError("cannot split it")
    seconds, nbytes = TABLE[str(layout)]
    return Estimate(layout, seconds, {"compute": seconds}, 0.0, {}, nbytes)


def layouts() -> list[Layout]:
    return [*map(Layout.parse, TABLE), Layout.parse("tensor=2")]


def test_the_fastest_that_fits_is_first() -> None:
    found = ranked(layouts(), estimated, 85)
    assert [row.layout for row in found.rows] == ["data=2", "data=2 zero=3", "", "pipe=2 micro=2"]
    assert [row.fits for row in found.rows] == [True, True, True, False]
    assert found.best.layout == "data=2"
    assert found.refused == (("tensor=2", "cannot split it"),)


def test_it_says_how_much_is_missing() -> None:
    with pytest.raises(PlanError, match='"data=2 zero=3", needs 10 B more') as found:
        _ = ranked(layouts(), estimated, 10).best
    assert "about 2 times as many devices" in str(found.value)


def test_a_step_that_allows_no_layout() -> None:
    with pytest.raises(PlanError, match="allows none"):
        _ = ranked([Layout.parse("tensor=2")], estimated, 10).best


def test_a_layout_is_found_by_any_order_of_its_words() -> None:
    found = ranked(layouts(), estimated, 85)
    assert found.row("zero=3 data=2").estimate.seconds == 3.0
    with pytest.raises(PlanError, match="cannot split it"):
        found.row("tensor=2")
    with pytest.raises(PlanError, match="not among"):
        found.row("data=2 micro=2")


def with_refined(seconds: float, among: Any) -> tuple[Ranking, list[str]]:
    """Layouts ranked, of which the refined ones take so long; those that were refined."""
    asked: list[str] = []

    def refined(layout: Layout) -> Estimate:
        asked.append(str(layout))
        return replace(estimated(layout), seconds=seconds)

    return ranked(layouts(), estimated, 100, refined=Refinement(refined, among)), asked


def test_refined_pipelines_are_sorted_again() -> None:
    found, asked = with_refined(4.0, first_pipelines)
    assert [row.layout for row in found.rows] == ["data=2", "data=2 zero=3", "pipe=2 micro=2", ""]
    assert asked == ["pipe=2 micro=2"]


def test_all_that_may_be_the_fastest_are_refined() -> None:
    """A refined one that is slower than before makes others close to the best."""
    found, asked = with_refined(2.2, close_to_best)
    assert asked == ["pipe=2 micro=2", "data=2"]
    assert [row.layout for row in found.rows] == ["data=2", "pipe=2 micro=2", "data=2 zero=3", ""]
    assert [row.estimate.seconds for row in found.rows] == [2.2, 2.2, 3.0, 5.0]


def test_layouts_that_split_nothing_are_left_out() -> None:
    def with_idle(layout: Layout) -> Estimate:
        if "seq" in layout.axes:
            raise IdleAxisError("seq", 2)
        return estimated(layout)

    found = ranked([*layouts(), Layout.parse("seq=2")], with_idle, 85)
    assert found.left_out == (("seq=2", "seq=2 splits nothing of this step"),)
    assert len(found.rows) == 4 and len(found.refused) == 1
    with pytest.raises(PlanError, match="splits nothing"):
        found.row("seq=2")
    with pytest.raises(PlanError, match="allows none") as error:
        _ = ranked([Layout.parse("seq=2")], with_idle, 85).best
    assert "splits nothing" in str(error.value)


def test_two_rankings_of_one_step_are_one() -> None:
    whole = ranked(layouts(), estimated, 85)
    first, second = (ranked(part, estimated, 85) for part in (layouts()[:2], layouts()[2:]))
    assert first.merged(second) == whole
