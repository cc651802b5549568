"""Estimates in several processes are those of one; a process that fails leaves its part to the first."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

import pytest
import torch

from tutti.errors import LayoutError, ShardingError
from tutti.layout import Layout
from tutti.planner.search.layout_choices import Space
from tutti.planning import side_by_side
from tutti.planning.side_by_side import (
    LEAST_COMPOSED,
    LEAST_LAYOUTS,
    OtherProcess,
    SharedGroups,
    divided,
    outcome_of,
)
from tutti.propagate.idle_axes import IdleAxisError

LAYOUTS = Space(16, 64, ("data", "tensor", "pipe")).layouts()


def estimate(layout: Layout) -> Any:
    if layout.remat == "full":
        raise ShardingError("no", why="of this test")
    if layout.axes.get("tensor") == 4:
        raise IdleAxisError("tensor", 4)
    return layout.num_ranks * layout.micro


def outcome(layout: Layout) -> Any:
    return outcome_of(layout, estimate, {}, lambda _: {})


def test_groups_of_a_deep_model_are_kinds_and_the_longest_come_first() -> None:
    shared = SharedGroups(LAYOUTS)
    kinds = [{x.axes.get("tensor", 1) for x in group} for group in shared.groups]
    assert sorted(map(len, kinds)) == [1] * len(kinds)
    assert len(set[Any]().union(*kinds)) == len(kinds)
    assert kinds[-1] == {1}  # no search for a placement
    taken = list(shared.taken())
    assert taken == list(chain.from_iterable(shared.groups))
    assert sorted(taken, key=str) == sorted(LAYOUTS, key=str)
    assert list(shared.taken()) == []


def test_processes_take_groups_until_none_is_left() -> None:
    shared = SharedGroups(LAYOUTS)
    others = [OtherProcess(shared.taken(), outcome) for _ in range(3)]
    taken = list(shared.taken())
    found = [list(other.outcomes) for other in others]
    assert sorted(chain(taken, *found), key=str) == sorted(LAYOUTS, key=str)
    for part in (taken, *found):
        rest = iter(part)
        for group in shared.groups:
            if group[0] in part:
                assert [next(rest) for _ in group] == group


def test_groups_of_a_process_that_dies_are_missing_and_no_others() -> None:
    shared = SharedGroups(LAYOUTS)
    other = OtherProcess(shared.taken(), lambda _: os._exit(1))
    assert other.outcomes == {}
    assert list(shared.taken()) == list(chain.from_iterable(shared.groups[1:]))


@pytest.mark.parametrize("number", [2, 5, 16])
def test_parts_of_another_share_no_program(number: int) -> None:
    parts = divided(LAYOUTS, number)
    assert sorted(chain.from_iterable(parts), key=str) == sorted(LAYOUTS, key=str)
    programs = [{(*x.axes.items(), x.micro) for x in part} for part in parts]
    assert sum(map(len, programs)) == len(set[Any]().union(*programs))
    sizes = [len(part) for part in parts]
    assert len(parts) == number and max(sizes) - min(sizes) <= 2 * 24  # schedules, zero, remat
    assert all(part == [x for x in LAYOUTS if x in part] for part in parts)


def test_a_few_layouts_are_fewer_parts() -> None:
    assert divided(LAYOUTS[:1], 4) == [LAYOUTS[:1]]


def test_another_process_finds_the_same() -> None:
    made: list[Layout] = []

    def noted(layout: Layout) -> Any:
        made.append(layout)
        return outcome(layout)

    other = OtherProcess(LAYOUTS, noted, lambda: {layout: str(layout) for layout in made})
    found = other.outcomes
    assert list(found) == LAYOUTS and not made
    assert other.pieces == {layout: str(layout) for layout in LAYOUTS}
    for layout, made in found.items():
        own = outcome(layout)
        assert type(made) is type(own) and str(made) == str(own)
        if isinstance(own, LayoutError):
            assert made.what == own.what  # type: ignore[union-attr]


def test_a_process_that_dies_leaves_nothing() -> None:
    other = OtherProcess(LAYOUTS, lambda _: os._exit(1))
    assert other.outcomes == {} and other.pieces == {}


def test_it_takes_several_processors_many_layouts_and_no_gpu_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def number(count: int, *, composed: bool = False) -> int:
        return side_by_side.num_processes([Layout()] * count, composed=composed)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert number(LEAST_LAYOUTS) == number(LEAST_COMPOSED, composed=True) == 3
    assert number(LEAST_LAYOUTS - 1) == number(LEAST_COMPOSED - 1, composed=True) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert number(LEAST_COMPOSED) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(100)})
    assert number(LEAST_COMPOSED) == 16
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert number(LEAST_COMPOSED) == 1
