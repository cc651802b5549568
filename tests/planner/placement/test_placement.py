"""Found placements against those of Megatron-LM: bytes over `tensor`, predicted time, words, numbers."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from tutti.capture.step import Captured, capture, copied
from tutti.layout import Layout
from tutti.partition.partition import Program, partition
from tutti.planner.placement.placement import Placement, cost_of, find_place
from tutti.propagate.plan import plan
from tutti.report.collective_records import records

sys.path.append(str(Path(__file__).parent))
from hand_placed import MODELS

WAYS = (2, 4)
CASES = [(name, ways) for name in MODELS for ways in WAYS]


@cache
def captured(name: str) -> Captured:
    return capture(*MODELS[name].arguments())


@cache
def found(name: str, ways: int) -> Placement:
    return find_place(captured(name), Layout.parse(f"tensor={ways}"))


def program(name: str, ways: int, place: dict[str, str]) -> Program:
    return partition(plan(copied(captured(name)), Layout.parse(f"tensor={ways}"), place))


def sent(made: Program) -> int:
    """Bytes that each rank sends over `tensor` in a step."""
    return sum(r.nbytes for r in records(made) if "tensor" in r.axes)


@pytest.mark.parametrize(("name", "ways"), CASES)
def test_no_more_bytes_than_megatron(name: str, ways: int) -> None:
    by_hand = sent(program(name, ways, dict(MODELS[name].place)))
    by_search = sent(program(name, ways, dict(found(name, ways).place)))
    assert 0 < by_search <= by_hand


@pytest.mark.parametrize(("name", "ways"), CASES)
def test_no_more_time_than_megatron(name: str, ways: int) -> None:
    by_hand = cost_of(captured(name), Layout.parse(f"tensor={ways}"), MODELS[name].place)
    made = found(name, ways)
    assert made.seconds <= 1.01 * by_hand.seconds
    assert made.seconds < made.whole_seconds
