"""Idle time and peaks against the closed forms of the papers; all times against a plain relaxation."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.schedule.strategies import played
from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import Action
from tutti.pipeline.schedule.schedule import Schedule
from tutti.pipeline.schedule.schedules import schedule
from tutti.planner.simulator import Timeline, simulate

# Multiples of a power of two, so that every sum is exact.
F, I, W = 1.0, 1.5, 1.25  # noqa: E741
B = I + W
COSTS = {"F": F, "I": I, "W": W}
UNIT = {"F": 1.0, "I": 1.0, "W": 1.0}
SIZES = [(p, m) for p in range(1, 7) for m in range(1, 13)]


def idle(timeline: Timeline) -> float:
    """The idle time, which is the same on every rank where all do the same work."""
    assert len(set(timeline.idle_seconds)) == 1
    return timeline.idle_seconds[0]


def test_gpipe() -> None:
    for p, m in SIZES:
        timeline = simulate(schedule("gpipe", p, m), COSTS)
        assert idle(timeline) == (p - 1) * (F + B)
        assert timeline.seconds == (m + p - 1) * (F + B)
        assert timeline.peak_live == (m,) * p


def test_slower() -> None:
    twice = {kind: 2 * seconds for kind, seconds in COSTS.items()}
    one, other = (
        simulate(schedule("zb", 3, 5), costs, transfer_seconds=t)
        for costs, t in ((COSTS, 0.5), (twice, 1.0))
    )
    assert one.slower(2.0) == other


def test_1f1b() -> None:
    for p, m in SIZES:
        timeline = simulate(schedule("1f1b", p, m), COSTS)
        assert idle(timeline) == (p - 1) * (F + B)
        assert timeline.peak_live == tuple(min(m, p - s) for s in range(p))


@pytest.mark.parametrize("v", [2, 3])
def test_interleaved(v: int) -> None:
    """(p-1)(F+B)/v for m >= p, be m a multiple of p or not, with F and B of all chunks: here they are of
    one. With fewer micro-batches each round but one leaves the ring empty for p - m of them."""
    for p, m in SIZES:
        timeline = simulate(schedule("interleaved", p, m, v), COSTS)
        assert idle(timeline) == (p - 1 + (v - 1) * max(0, p - m)) * (F + B)
        # p + (p-1)/v micro-batches of v chunks.
        if m % p == 0 and m >= 2 * p:
            assert max(timeline.peak_live) == timeline.peak_live[0] == v * p + p - 1
        group = math.ceil(m / max(1, m // p))
        assert max(timeline.peak_live) <= min(v * m, (v - 1) * group + 2 * p - 1)


def test_zb() -> None:
    """(p-1)(F+I-W) for m >= p, W <= I, W <= F; every W that is missing for m < p adds one."""
    costs = {"F": 1.0, "I": 1.5, "W": 0.75}
    for p, m in SIZES:
        timeline = simulate(schedule("zb", p, m), costs)
        assert timeline.peak_live == (min(m, p),) * p
        if m >= p:
            assert idle(timeline) == (p - 1) * (1.0 + 1.5 - 0.75)
        assert idle(simulate(schedule("zb", p, m), UNIT)) == (p - 1) + max(0, p - m)


def test_zbv() -> None:
    """(p-1)F/2 for F = I = W and m >= 2p - 1, with F of both chunks: here it is of one."""
    for p, m in SIZES:
        timeline = simulate(schedule("zbv", p, m), UNIT)
        assert idle(timeline) == max(p - 1, 4 * (p - 1) - 2 * (m - 1))
        assert max(timeline.peak_live) <= 2 * min(m, p)
        if m >= 2 * p - 1:
            assert idle(timeline) == p - 1
            assert timeline.peak_live == (2 * p,) * p


def test_the_order_of_merit() -> None:
    """At the same memory zb idles less than 1f1b, and zbv less than zb: 9, 3 and, for stages half as long,
    1.5 units of a forward."""
    found = {n: simulate(schedule(n, 4, 8), UNIT) for n in ("gpipe", "1f1b", "zb", "zbv")}
    shares = {n: t.idle_share for n, t in found.items()}
    assert shares["zbv"] < shares["zb"] < shares["1f1b"] == shares["gpipe"] == 9 / 33
    assert (shares["zb"], shares["zbv"]) == (3 / 27, 3 / 51)


def relaxed(timeline: Timeline, costs: dict[Any, float], moving: float) -> dict[Action, float]:
    """The end of every action: the least times that satisfy all that it waits for, found by repeating.

    A receive ends when its value is there, a send when it is.
    """
    whole = timeline.schedule
    waits: dict[Action, list[Action]] = {a: [] for row in whole.rows for a in row}
    for row in whole.rows:
        compute: Action | None = None
        streams: dict[int, Action] = {}
        for action in row:
            # A send takes no time of its row: what follows it waits for what stands before it.
            if compute is not None:
                waits[action].append(compute)
            if action.kind == "S":
                to = whole.rank_of(action.peer)
                waits[action] += [streams[to]] if to in streams else []
                streams[to] = action
                continue
            if action.kind == "R":
                waits[action].append(action.counterpart)
            compute = action
    ends = dict.fromkeys(waits, 0.0)
    changed = True
    while changed:
        changed = False
        for action, before in waits.items():
            start = max((ends[b] for b in before), default=0.0)
            cost = {"S": moving, "R": 0.0}.get(action.kind)
            end = start + (costs[action.stage, action.kind] if cost is None else cost)
            changed |= end != ends[action]
            ends[action] = end
    return ends


def random_costs(data: st.DataObject, made: Schedule) -> dict[Any, float]:
    seconds = st.one_of(st.just(0.0), st.floats(1e-3, 10.0))
    return {(s, k): data.draw(seconds) for s in range(made.num_stages) for k in "FIWB"}


def check_times(
    made: Schedule, costs: dict[Any, float], moving: float, pairs: list | None, needs: dict
) -> None:
    timeline = simulate(made, costs, transfer_seconds=moving, edges=pairs)
    spans = {span.action: span for row in timeline.rows for span in row}
    arrivals = {span.action: span.end for span in timeline.transfers}
    assert set(spans) == {a for row in made.rows for a in row}
    for row in timeline.rows:
        assert all(a.end <= b.start for a, b in pairwise(row))
    for action, inputs in needs.items():
        for before in inputs:
            send = Action.send(before, action.stage)
            assert spans[action].start >= arrivals.get(send, spans[before].end)
    ends = relaxed(timeline, costs, moving)
    assert {a: ends[a] for a in spans} == {a: span.end for a, span in spans.items()}
    assert {a: ends[a] for a in arrivals} == arrivals
    assert timeline.seconds == max(span.end for span in spans.values())


@given(played(), st.data(), st.floats(0.0, 5.0))
def test_any_schedule_at_any_speed(case: tuple, data: st.DataObject, moving: float) -> None:
    made, pairs, needs = case
    check_times(made, random_costs(data, made), moving, pairs, needs)


@settings(max_examples=60)
@given(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb", "zbv"]), st.data())
def test_named_schedules_at_any_speed(name: str, data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, 3)) if name == "interleaved" else 1
    made = schedule(name, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7)), chunks)
    last = made.num_stages - 1
    needs: dict[Action, list[Action]] = {}
    for action in (a for row in made.rows for a in row):
        kind, stage, micro = action.kind, action.stage, action.micro
        needs[action] = {
            "F": [Action("F", stage - 1, micro)] if stage else [],
            "W": [Action("I", stage, micro)],
        }.get(kind, [Action("F", stage, micro)])
        if kind in "IB" and stage < last:
            needs[action].append(Action(kind, stage + 1, micro))
    check_times(made, random_costs(data, made), data.draw(st.floats(0.0, 5.0)), None, needs)


def test_one_transfer_after_another() -> None:
    """Two values made at 1 and 2 need 3 each on their way: the second is there at 7, not at 5."""
    made = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
    timeline = simulate(made, UNIT, transfer_seconds=3.0)
    assert [(str(s.action), s.start, s.end) for s in timeline.transfers if s.action.stage == 0] == [
        ("0F0>1", 1.0, 4.0),
        ("0F1>1", 4.0, 7.0),
    ]
    assert [s.start for s in timeline.rows[1]] == [4.0, 7.0, 8.0, 10.0]
    other = simulate(made, UNIT, transfer_seconds={(0, 1): 3.0})
    assert other == timeline


def test_waits_for_messages_are_apart_from_the_bubble() -> None:
    """Three ranks, one micro-batch: F at 0, 3, 6, B at 7, 11, 15; each of 4 messages is on its way for 2."""
    timeline = simulate(schedule("1f1b", 3, 1), UNIT, transfer_seconds=2.0)
    assert timeline.seconds == 3 * (1 + 2) + 4 * 2
    assert timeline.message_seconds == (8.0, 8.0, 8.0)
    assert timeline.idle_seconds == (14.0, 14.0, 14.0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb", "zbv"])
def test_without_messages_idle_ranks_wait_for_the_bubble_alone(name: str) -> None:
    made = schedule(name, 4, 8)
    assert simulate(made, COSTS).message_seconds == (0.0,) * 4
    slow = simulate(made, COSTS, transfer_seconds=1000.0)
    for waits, idle_seconds in zip(slow.message_seconds, slow.idle_seconds, strict=True):
        assert 0.97 * idle_seconds < waits <= idle_seconds


def test_the_most_exact_cost_counts() -> None:
    made = Schedule.parse("0G 0F0 0F1 0B0 0B1 0A")
    costs: dict[Any, float] = {"F": 1.0, "I": 2.0, "W": 3.0, (0, "I"): 4.0, "A": 0.5}
    costs[Action("F", 0, 1)] = 16.0
    spans = simulate(made, costs).rows[0]
    assert [s.end - s.start for s in spans] == [0.0, 1.0, 16.0, 7.0, 7.0, 0.5]
    assert simulate(made, costs | {"B": 8.0}).seconds == 33.5


def test_bytes() -> None:
    """zbv on rank 0 of 2: stage 0 keeps 10 of which I frees 4, stage 3 keeps 100 of which it frees 30."""
    made = Schedule.parse(
        "0F0 3F0 3I0 0F1 3W0 3F1 0I0 0W0 3I1 0I1 0W1 3W1\n1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"
    )
    keeps, frees = {0: 10, 1: 7, 2: 5, 3: 100}, {0: 4, 3: 30}
    edges: list[tuple[int, int]] = []
    whole = simulate(made, UNIT, edges=edges, nbytes=keeps)
    freed = simulate(made, UNIT, edges=edges, nbytes=keeps, freed_nbytes=frees)
    # After 0F0 3F0: 110; 3I0 0F1: 90 where I frees, else 120; 3W0 3F1: 120 either way.
    assert (whole.peak_nbytes, freed.peak_nbytes) == ((120, 12), (120, 12))
    frees = {0: 10, 3: 100}
    assert simulate(made, UNIT, edges=edges, nbytes=keeps, freed_nbytes=frees).peak_nbytes[0] == 120
    assert simulate(made, UNIT, edges=edges).peak_nbytes == (0, 0)


@pytest.mark.parametrize("name", ["1f1b", "zb", "zbv", "gpipe"])
def test_bytes_are_live_micro_batches_of_equal_stages(name: str) -> None:
    made = schedule(name, 3, 7)
    timeline = simulate(made, UNIT, nbytes=dict.fromkeys(range(made.num_stages), 5))
    assert timeline.peak_nbytes == tuple(5 * live for live in timeline.peak_live)


def test_what_input_gradients_free_is_not_held_for_the_weight_gradients() -> None:
    made = Schedule.parse("0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2")
    for freed, peak in ((0, 30), (4, 22), (10, 10)):
        found = simulate(made, UNIT, nbytes={0: 10}, freed_nbytes={0: freed})
        assert found.peak_nbytes == (peak,)


@pytest.mark.parametrize(
    ("costs", "moving", "what"),
    [
        ({"F": 1.0, "I": 1.0}, 0.0, "costs lack the seconds of W"),
        ({"I": 1.0, "W": 1.0}, 0.0, "costs lack the seconds of F"),
        ({"F": -1.0, "B": 1.0}, 0.0, "0F0 cannot take -1.0 seconds"),
        ({"F": 1.0, "B": math.inf}, 0.0, "1B0 cannot take inf seconds"),
        ({"F": math.nan, "B": 1.0}, 0.0, "0F0 cannot take nan seconds"),
        ({"F": 1.0, "B": 1.0}, -0.5, "a transfer cannot take -0.5 seconds"),
        ({"F": 1.0, "B": 1.0}, {(0, 2): 1.0}, "transfer_seconds lacks the edge (0, 1)"),
    ],
)
def test_costs_that_are_none(costs: dict[str, float], moving: Any, what: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(Schedule.parse("0F0 0B0\n1F0 1B0"), costs, transfer_seconds=moving)
    assert what in caught.value.what


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), UNIT)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_ranks_that_share_processors(data: st.DataObject) -> None:
    """Between the time with a processor each and that of all work, one after the other, with what waits."""
    made = schedule("1f1b", 4, 6, 1)
    timeline = simulate(made, random_costs(data, made))
    work = math.fsum(s.end - s.start for row in timeline.rows for s in row)
    assert timeline.shared_seconds(1.0) == timeline.seconds
    for ranks in (2.0, 4.0):
        shared, least = timeline.shared_seconds(ranks), work * ranks / 4
        assert max(timeline.seconds, least) * (1 - 1e-9) <= shared
        assert shared <= (timeline.seconds + least) * (1 + 1e-9)
    assert timeline.shared_seconds(4.0) == pytest.approx(work)  # on one processor, never idle
