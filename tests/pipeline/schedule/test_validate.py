"""The validator: what is wrong is refused with its reason; its verdict is that of a search for cycles."""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.schedule.strategies import exchanged, played
from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import Action
from tutti.pipeline.schedule.schedule import Schedule
from tutti.pipeline.schedule.schedules import schedule
from tutti.pipeline.schedule.transfers import with_gathers, with_reductions, with_transfers
from tutti.pipeline.schedule.validate import validate

RIGHT = """
0F0 0F0>1 0F1 0F1>1 0<1B0 0B0 0<1B1 0B1
1<0F0 1F0 1B0 1B0>0 1<0F1 1F1 1B1 1B1>0
"""
SPLIT = """
0F0 0F1 0I0 0W0 0I1 0W1
1F0 1I0 1F1 1I1 1W0 1W1
"""


def refused(text: str, *, blocking_sends: bool = False) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule.parse(text), blocking_sends=blocking_sends)
    return caught.value


def test_what_is_right_is_accepted() -> None:
    report = validate(Schedule.parse(RIGHT))
    assert report.schedule == Schedule.parse(RIGHT)
    assert (report.peak_live, report.peak_live_of_stage) == ((2, 1), (2, 1))
    assert validate(Schedule.parse(SPLIT)).peak_live == (2, 2)


FAULTS = {
    "a pair swapped": ("0F1 0F1>1", "0F1>1 0F1", "0F1>1 stands before 0F1", "needs what 0F1 makes"),
    "a receive missing": ("1<0F1 ", "", "the receive 1<0F1 is missing", "0F1>1"),
    "a send missing": ("1B1>0", "", "the send 1B1>0 is missing", "0<1B1"),
    "neither end": ("0<1B1 ", "", "the receive 0<1B1 is missing", "action 8 of its row: 1B1>0"),
    "an action twice": ("0F1 ", "0F1 0F0 ", "0F0 appears twice", "rank 0, action 1 of its row: 0F0"),
    "a send twice": ("0F1 ", "0F0>1 0F1 ", "0F0>1 appears twice", "rank 0, action 2"),
    "a backward missing": ("0B1", "", "0B1 is missing", "B or both I and W"),
    "a forward missing": ("1F1 ", "", "1F1 is missing", "the schedule has 2"),
    "a stage on two ranks": ("1F1 1B1 1B1>0", "0B1", "stage 0 is on two ranks, 0 and 1", "weights"),
    "the backward first": ("1F0 1B0", "1B0 1F0", "1B0 stands before 1F0", "needs what 1F0 makes"),
    "a receive too late": ("1<0F0 1F0", "1F0 1<0F0", "1F0 stands before 1<0F0", "0F0 makes on rank 0"),
    "both ways of backward": ("0B1", "0B1 0I1", "0B1 and 0I1 do the same", "B is I and W in one"),
    "half a backward": ("0B1", "0I1", "0W1 is missing", "both I and W"),
    "sends out of order": (
        "0F0 0F0>1 0F1 0F1>1", "0F0 0F1 0F1>1 0F0>1",
        "1<0F0 is out of order", "the next value that rank 0 sends to rank 1 is 0F1>1",
    ),
    "receives out of order": (
        "0<1B0 0B0 0<1B1 0B1", "0<1B1 0<1B0 0B0 0B1",
        "0<1B1 is out of order", "the next value that rank 1 sends to rank 0 is 1B0>0",
    ),
    "a transfer that nobody needs": (
        "0<1B1 0B1", "0<1B1 0B1 0B1>1", "0B1>1 moves what nobody reads", "hold no (0, 1), or nothing makes"
    ),
    "a transfer within a rank": (
        "0F1>1", "0F1>1 0F1>0", "0F1>0 moves what nobody reads", "both on rank 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_refused_with_its_reason(fault: str) -> None:
    old, new, what, why = FAULTS[fault]
    assert RIGHT.count(old) >= 1
    error = refused(RIGHT.replace(old, new, 1))
    assert what in error.what and why in error.why
    assert error.at and error.fix


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("0I1 0W1", "0W1 0I1", "0W1 stands before 0I1"),
        ("1W1", "", "1W1 is missing"),
        ("1I1 1W0", "1B1 1W0", "1B1 and 1W1 do the same work twice"),
    ],
)
def test_faults_of_split_backwards(old: str, new: str, what: str) -> None:
    assert what in refused(SPLIT.replace(old, new, 1)).what


def test_a_deadlock_shows_its_circle() -> None:
    error = refused("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    assert error.what == "deadlock: 2 ranks wait for each other"
    assert error.at == "rank 0, action 3: 0<1B0"
    assert error.why == (
        "rank 0 waits at 0<1B0 until rank 1 sends (1B0>0); "
        "rank 1 waits at 1<0F1 until rank 0 sends (0F1>1)"
    )


def test_the_circle_leaves_out_those_who_only_wait_for_it() -> None:
    """Rank 0 waits for rank 1, which waits with rank 2 in a circle."""
    error = refused("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1")
    assert error.what == "deadlock: 2 ranks wait for each other"
    assert "rank 1 waits at 1<2B0" in error.why and "rank 2 waits at 2<1F1" in error.why
    assert "rank 0 waits" not in error.why


def test_two_ranks_that_send_to_each_other_need_buffers() -> None:
    validate(Schedule.parse(RIGHT))
    error = refused(RIGHT, blocking_sends=True)
    assert error.why == (
        "rank 0 waits at 0F1>1 until rank 1 receives (1<0F1); "
        "rank 1 waits at 1B0>0 until rank 0 receives (0<1B0)"
    )
    assert "buffer" in error.fix


def test_gathers_and_reductions_have_their_place() -> None:
    whole = with_reductions(with_gathers(Schedule.parse(SPLIT)))
    text = str(validate(whole).schedule)
    assert "0G 0F0" in text and "0W1 0A" in text and "1G 1<0F0" in text and "1W1 1A" in text
    # Weights may be gathered again; gradients are reduced once, and when they are there.
    validate(Schedule.parse(str(whole).replace("0I0", "0G 0I0")))
    assert "0A stands before 0W1" in refused(str(whole).replace("0W1 0A", "0A 0W1")).what
    assert "0F0 stands before 0G" in refused(str(whole).replace("0G 0F0", "0F0 0G")).what
    assert "0A appears twice" in refused(str(whole).replace("0W1 0A", "0W1 0A 0A")).what


@pytest.mark.parametrize("edge", [(1, 0), (0, 0), (0, 2), (-1, 0)])
def test_an_edge_that_is_none_is_refused(edge: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match="is no edge between stages"):
        validate(Schedule.parse(SPLIT), [edge])


def test_a_gap_of_stages_is_refused_at_once() -> None:
    with pytest.raises(ScheduleError, match="no rank plays stage 0"):
        validate(Schedule.parse("999999F999999"))


@pytest.mark.parametrize("name", ["1f1b", "zb", "zbv", "interleaved"])
def test_no_action_can_be_left_out(name: str) -> None:
    whole = with_transfers(schedule(name, 3, 4, 2 if name == "interleaved" else 1))
    for rank, row in enumerate(whole.rows):
        for i in range(len(row)):
            dropped = (*whole.rows[:rank], row[:i] + row[i + 1 :], *whole.rows[rank + 1 :])
            with pytest.raises(ScheduleError, match="is missing"):
                validate(Schedule(dropped))


def contracted(whole: Schedule, *, rendezvous: bool) -> dict[Action, set[Action]]:
    """What waits for what in a schedule with transfers; a rendezvous is one node of both its ends."""

    def node(action: Action) -> Action:
        return action.counterpart if rendezvous and action.kind == "R" else action

    graph: defaultdict[Action, set[Action]] = defaultdict(set)
    for row in whole.rows:
        for before, action in pairwise(row):
            graph[node(action)].add(node(before))
        for action in row:
            if action.kind == "R" and not rendezvous:
                graph[action].add(action.counterpart)
    return graph


def has_cycle(graph: dict[Action, set[Action]]) -> bool:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def accepted(made: Schedule, pairs: list[tuple[int, int]], *, blocking: bool = False) -> bool:
    try:
        validate(made, pairs, blocking_sends=blocking)
    except ScheduleError:
        return False
    return True


@given(played())
def test_what_can_be_played_is_accepted(case: tuple) -> None:
    """Whatever the edges: so the pass puts no receive where it makes ranks wait forever."""
    made, pairs, _ = case
    whole = validate(made, pairs).schedule
    assert validate(whole, pairs).schedule == whole
    blocked = has_cycle(contracted(whole, rendezvous=True))
    assert accepted(whole, pairs, blocking=True) is not blocked


@given(played(), st.data())
def test_the_verdict_is_that_of_a_search_for_cycles(case: tuple, data: st.DataObject) -> None:
    made, pairs, needs = case
    made = data.draw(exchanged(made))
    graph = {action: set(before) for action, before in needs.items()}
    for row in made.rows:
        for before, action in pairwise(row):
            graph[action].add(before)
    assert accepted(made, pairs) is not has_cycle(graph)


@given(played(), st.data())
def test_the_verdict_with_transfers_in_any_order(case: tuple, data: st.DataObject) -> None:
    """Neighbors exchanged among transfers, too: right if the order is, and nobody waits in a circle."""
    made, pairs, needs = case
    whole = data.draw(exchanged(with_transfers(made, pairs)))
    graph = contracted(whole, rendezvous=False)
    at = {action: (rank, i) for rank, row in enumerate(whole.rows) for i, action in enumerate(row)}
    ordered = all(at[a.made] < at[a] for a in at if a.kind == "S") and all(
        at[before if at[before][0] == at[a][0] else Action.receive(before, a.stage)] < at[a]
        for a, inputs in needs.items()
        for before in inputs
    )
    streams: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for action, (rank, _) in at.items():
        if action.kind == "S":
            streams[rank, at[action.counterpart][0]].append(action)
    in_order = all(
        at[a.counterpart] < at[b.counterpart]
        for sends in streams.values()
        for a, b in pairwise(sends)
    )
    assert accepted(whole, pairs) is (ordered and in_order and not has_cycle(graph))
