"""Estimates in two processes are those of one; a process that fails leaves its part to the other."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch

from tutti.errors import LayoutError, ShardingError
from tutti.layout import Layout
from tutti.planner.search.idle_axes import IdleAxisError
from tutti.planner.search.layout_choices import Space
from tutti.planning import side_by_side
from tutti.planning.side_by_side import OtherProcess, can_share, other_half, outcome_of

LAYOUTS = Space(16, 64, ("data", "tensor", "pipe")).layouts()


def estimate(layout: Layout) -> Any:
    if layout.remat == "full":
        raise ShardingError("no", why="of this test")
    if layout.axes.get("tensor") == 4:
        raise IdleAxisError("tensor", 4)
    return layout.num_ranks * layout.micro


def outcome(layout: Layout) -> Any:
    return outcome_of(layout, estimate, {})


def test_halves_have_whole_kinds_and_half_of_the_pieces() -> None:
    rest = other_half(LAYOUTS)
    theirs = {x.axes.get("tensor", 1) for x in rest}
    assert {x.axes.get("tensor", 1) for x in LAYOUTS if x not in rest}.isdisjoint(theirs)
    sizes = Counter(x in rest for x in LAYOUTS)
    assert 0.25 < sizes[True] / len(LAYOUTS) < 0.75


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


def test_it_takes_two_processors_many_layouts_and_no_gpu_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = LAYOUTS * 10
    monkeypatch.setattr(side_by_side, "LEAST_LAYOUTS", len(many))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert can_share(many) and not can_share(many[1:])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert not can_share(many)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not can_share(many)
