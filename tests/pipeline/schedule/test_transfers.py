"""Sends and receives where they belong, in the order of their stream."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given

from tests.pipeline.schedule.strategies import played
from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import Action
from tutti.pipeline.schedule.schedule import Schedule
from tutti.pipeline.schedule.schedules import schedule
from tutti.pipeline.schedule.transfers import with_gathers, with_reductions, with_transfers


def text(source: str, edges: list[tuple[int, int]] | None = None) -> list[str]:
    return str(with_transfers(Schedule.parse(source), edges)).split("\n")


def test_a_chain() -> None:
    assert text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1") == [
        "0F0 0F0>1 0F1 0F1>1 0<1B0 0B0 0<1B1 0B1",
        "1<0F0 1F0 1B0 1B0>0 1<0F1 1F1 1B1 1B1>0",
    ]


def test_the_turn_of_a_v_needs_no_transfer() -> None:
    assert text("0F0 3F0 3I0 3W0 0I0 0W0\n1F0 2F0 2B0 1I0 1W0") == [
        "0F0 0F0>1 3<2F0 3F0 3I0 3I0>2 3W0 0<1I0 0I0 0W0",
        "1<0F0 1F0 2F0 2F0>3 2<3I0 2B0 1I0 1I0>0 1W0",
    ]


def test_a_skip_has_its_way_back() -> None:
    assert text("0F0 0B0\n1F0 1B0\n2F0 2B0", [(0, 1), (1, 2), (0, 2)]) == [
        "0F0 0F0>1 0F0>2 0<1B0 0<2B0 0B0",
        "1<0F0 1F0 1F0>2 1<2B0 1B0 1B0>0",
        "2<0F0 2<1F0 2F0 2B0 2B0>0 2B0>1",
    ]


def test_a_receive_moves_where_its_stream_has_it() -> None:
    """Rank 0 sends micro-batch 1 first, rank 1 reads micro-batch 0 first: both are received before."""
    assert text("0F1 0F0 0B0 0B1\n1F0 1F1 1B0 1B1") == [
        "0F1 0F1>1 0F0 0F0>1 0<1B0 0B0 0<1B1 0B1",
        "1<0F1 1<0F0 1F0 1F1 1B0 1B0>0 1B1 1B1>0",
    ]


def test_without_edges_nothing_moves() -> None:
    made = schedule("1f1b", 3, 2)
    assert with_transfers(made, []) == made


def test_what_cannot_be_given_transfers() -> None:
    with pytest.raises(ScheduleError, match="sends and receives already"):
        with_transfers(with_transfers(schedule("zb", 2, 2)))
    with pytest.raises(ScheduleError, match="1B0 is missing"):
        with_transfers(Schedule.parse("0F0 0B0\n1F0"))


@given(played())
def test_every_value_is_moved_once_and_in_order(case: tuple) -> None:
    """Compute rows stay as they are; sends follow their maker at once; streams keep their order."""
    made, pairs, needs = case
    whole = with_transfers(made, pairs)
    assert [[a for a in row if a.computes] for row in whole.rows] == [list(r) for r in made.rows]
    due = {
        Action.send(before, action.stage)
        for action, inputs in needs.items()
        for before in inputs
        if made.rank_of(before.stage) != made.rank_of(action.stage)
    }
    sends, receives = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(whole.rows):
        last = None
        for action in row:
            if action.kind == "S":
                assert action.made == last
                sends[rank, whole.rank_of(action.peer)].append(action)
            elif action.kind == "R":
                receives[whole.rank_of(action.peer), rank].append(action.counterpart)
            else:
                last = action
    assert sends == receives
    moved = [send for stream in sends.values() for send in stream]
    assert set(moved) == due and len(moved) == len(due)


def test_gathers_and_reductions() -> None:
    made = Schedule.parse("0F0 1F0 1I0 1W0 0B0")
    assert str(with_gathers(made)) == "0G 0F0 1G 1F0 1I0 1W0 0B0"
    assert str(with_reductions(made)) == "0F0 1F0 1I0 1W0 1A 0B0 0A"
    both = with_transfers(with_reductions(with_gathers(schedule("zb", 2, 1))))
    assert str(both) == ("0G 0F0 0F0>1 0<1I0 0I0 0W0 0A\n1G 1<0F0 1F0 1I0 1I0>0 1W0 1A")
