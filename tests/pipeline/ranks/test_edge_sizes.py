"""Edges between pipeline ranks hold what the rows need: in any order of the ranks, all reach their ends."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.schedule.strategies import Pairs, played
from tutti.graph.ops.loop import RECEIVE, SEND, Body, Do
from tutti.pipeline.ranks.edge_sizes import EdgeSize, size_of_edges
from tutti.pipeline.schedule.schedule import Schedule
from tutti.pipeline.schedule.schedules import one_f_one_b
from tutti.pipeline.schedule.transfers import with_transfers

Message = tuple[int, str, int]
LEAST = EdgeSize(capacity=64, num_slots=2)


def bodies_of(schedule: Schedule, nbytes: Mapping[Message, list[int]]) -> list[Body]:
    """Bodies that only send and receive: `nbytes` has the size of each value of a message."""
    names = {
        message: tuple(f"{message}.{i}" for i in range(len(sizes)))
        for message, sizes in nbytes.items()
    }
    vals = {
        name: torch.empty(size, dtype=torch.uint8, device="meta")
        for message, sizes in nbytes.items()
        for name, size in zip(names[message], sizes, strict=True)
    }
    bodies = []
    for row in schedule.rows:
        found = [
            Do(a.moved, a.stage, a.micro, SEND if a.kind == "S" else RECEIVE, a.peer)
            for a in row
            if a.kind in "SR"
        ]
        bodies.append(Body(1, {}, tuple(found), (), (), (), messages=names, vals=vals))
    return bodies


def messages_of(schedule: Schedule) -> list[Message]:
    sends = [a for row in schedule.rows for a in row if a.kind == "S"]
    return list(dict.fromkeys((a.stage, a.moved, a.peer) for a in sends))


def ends(bodies: list[Body], schedule: Schedule, size: EdgeSize, chance: random.Random) -> bool:
    """Whether all ranks reach the end of their rows, with the ranks in random order."""
    rows: list[list[tuple[tuple[int, int], int]]] = []
    for body in bodies:
        row = []
        for do in body.row:
            sends = do.way == SEND
            source, to = (do.stage, do.other) if sends else (do.other, do.stage)
            edge = schedule.rank_of(source), schedule.rank_of(to)
            for name in body.messages.get((source, do.kind, to), ()):
                slots = size.slots_for(body.vals[name].nbytes)
                row += [(edge, 1 if sends else -1)] * slots
        rows.append(row)
    held: defaultdict[tuple[int, int], int] = defaultdict(int)
    while left := [row for row in rows if row]:
        able = [row for row in left if 0 <= held[row[0][0]] + row[0][1] <= size.num_slots]
        if not able:
            return False
        edge, change = chance.choice(able).pop(0)
        held[edge] += change
    return True


@given(played(), st.randoms(use_true_random=False), st.data())
def test_every_rank_reaches_its_end(
    made: tuple[Schedule, Pairs, object], chance: random.Random, data: st.DataObject
) -> None:
    schedule = with_transfers(made[0], made[1])
    values = st.lists(st.integers(0, 200), min_size=1, max_size=9)
    nbytes = {message: data.draw(values) for message in messages_of(schedule)}
    bodies = bodies_of(schedule, nbytes)
    size = size_of_edges(bodies, schedule.rank_of, LEAST)
    assert size.capacity >= LEAST.capacity and size.num_slots >= LEAST.num_slots
    assert all(ends(bodies, schedule, size, chance) for _ in range(3))


@pytest.mark.parametrize("num_values", [1, 9, 40])
def test_values_of_one_size_take_a_slot_each(num_values: int) -> None:
    schedule = with_transfers(one_f_one_b(2, 4))
    bodies = bodies_of(schedule, {m: [1000] * num_values for m in messages_of(schedule)})
    size = size_of_edges(bodies, schedule.rank_of, EdgeSize(4000, 4))
    assert size == EdgeSize(4000 * num_values, 4 * num_values)
    assert size.slots_for(1000) == 1


def test_one_large_value_among_small_ones_needs_no_large_slots() -> None:
    schedule = with_transfers(one_f_one_b(2, 4))
    sizes = [1_000_000, *[8] * 99]
    bodies = bodies_of(schedule, dict.fromkeys(messages_of(schedule), sizes))
    size = size_of_edges(bodies, schedule.rank_of, EdgeSize(4096, 8))
    assert size.num_slots == 400 and size.capacity == 8_000_000
    assert size.slots_for(1_000_000) == 50


def test_ranks_that_both_send_all_they_have_first() -> None:
    """Two stages of each rank that do not need each other: 20 messages each way before the first receive."""
    schedule = with_transfers(
        Schedule.parse(
            "\n".join(
                " ".join(f"{stage}{kind}{m}" for stage, kind in order for m in range(20))
                for order in (["0F", "3F", "3B", "0B"], ["2F", "1F", "1B", "2B"])
            )
        ),
        [(0, 1), (2, 3)],
    )
    bodies = bodies_of(schedule, {m: [16, 16] for m in messages_of(schedule)})
    size = size_of_edges(bodies, schedule.rank_of, LEAST)
    assert ends(bodies, schedule, size, random.Random(0))
    half = EdgeSize(size.capacity // 2, size.num_slots // 2)
    assert not ends(bodies, schedule, half, random.Random(0))
