"""The text of actions and schedules: it parses back, and what is no text is refused at its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import Action
from tutti.pipeline.schedule.schedule import Schedule

small = st.integers(0, 999_999)
computed = st.builds(Action, st.sampled_from("FIWB"), small, small)
moved = st.builds(Action, st.sampled_from("FIB"), small, small)
actions = st.one_of(
    computed,
    st.builds(Action, st.sampled_from("GA"), small),
    st.builds(Action.send, moved, small),
    st.builds(Action.receive, moved, small),
)
rows = st.lists(st.lists(actions, min_size=1, max_size=6).map(tuple), min_size=1, max_size=4)
blanks = st.text(" \t", min_size=1, max_size=3)


@given(actions)
def test_an_action_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(rows.map(tuple))
def test_a_schedule_parses_back(rows: tuple[tuple[Action, ...], ...]) -> None:
    schedule = Schedule(rows)
    assert Schedule.parse(str(schedule)) == schedule


@given(rows, st.data())
def test_blanks_comments_and_empty_lines_mean_nothing(rows: list, data: st.DataObject) -> None:
    text = ""
    for row in rows:
        text += data.draw(st.sampled_from(["", "\n", "  # 9F9 x\n", "\r\n"]))
        text += "".join(data.draw(blanks) + str(a) for a in row)
        text += data.draw(st.sampled_from(["\n", "\r\n", "#1F1\n", " # any thing\n"]))
    assert Schedule.parse(text).rows == tuple(rows)


def test_words() -> None:
    made = Action("F", 2, 0)
    assert [str(made), str(Action.send(made, 3)), str(Action.receive(made, 3))] == [
        "2F0",
        "2F0>3",
        "3<2F0",
    ]
    send, receive = Action.parse("3I1>2"), Action.parse("2<3I1")
    assert (send.stage, send.peer, receive.stage, receive.peer) == (3, 2, 2, 3)
    assert send.counterpart == receive and receive.counterpart == send
    assert send.made == receive.made == Action("I", 3, 1)
    assert Action.parse("12G") == Action("G", 12) and Action.parse("0A") == Action("A", 0)


WRONG = [
    "2f0",
    "F0",
    "2F",
    "2X0",
    "2W0>1",
    "2F0>",
    "<2F0",
    "3<2W0",
    "2G0",
    "-1F0",
    "2F0,2F1",
    "٣F0",
]
WRONG += ["9999999F0", "1F0>2>3"]


@given(rows, st.data(), st.sampled_from(WRONG))
def test_a_wrong_word_is_refused_at_its_line_and_column(
    rows: list, data: st.DataObject, wrong: str
) -> None:
    """Columns are counted here by writing the text piece by piece."""
    at_row = data.draw(st.integers(0, len(rows) - 1))
    at_word = data.draw(st.integers(0, len(rows[at_row])))
    lines, place = [], (0, 0)
    for i, row in enumerate(rows):
        lines += data.draw(st.sampled_from([[], [""], ["# 1F"]]))
        words = [str(a) for a in row]
        if i == at_row:
            words.insert(at_word, wrong)
        line = ""
        for j, word in enumerate(words):
            line += data.draw(blanks)
            if (i, j) == (at_row, at_word):
                place = (len(lines) + 1, len(line) + 1)
            line += word
        lines.append(line)
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse("\n".join(lines), "mine.txt")
    assert caught.value.at == f"mine.txt, line {place[0]}, column {place[1]}"
    assert caught.value.what == f'cannot read "{wrong}" as an action'


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("2f0", "write 2F0"),
        ("3<2i0", "write 3<2I0"),
        ("F7", "write the stage first, as in 0F7"),
        ("2W", "add the micro-batch, as in 2W0"),
        ("?", "write it like 2F0"),
    ],
)
def test_the_fix_is_the_word_that_was_meant(word: str, fix: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Action.parse(word)
    assert caught.value.fix == fix


@pytest.mark.parametrize("text", ["", "\n \n", "# 0F0"])
def test_no_action_is_no_schedule(text: str) -> None:
    with pytest.raises(ScheduleError, match="nothing holds no action"):
        Schedule.parse(text, "nothing")


def test_rows_that_are_no_schedule() -> None:
    with pytest.raises(ScheduleError, match="no rows"):
        Schedule(())
    with pytest.raises(ScheduleError, match="rank 1 of the schedule has nothing to do"):
        Schedule(((Action("F", 0, 0),), ()))


def test_ranks_and_stages() -> None:
    schedule = Schedule.parse("0F0 3F0 3<2F0 0F4\n1F0 2F0")
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_micro) == (2, 4, 5)
    assert [schedule.rank_of(s) for s in range(4)] == [0, 1, 1, 0]
    assert [schedule.stages_of(r) for r in range(2)] == [(0, 3), (1, 2)]
    with pytest.raises(ScheduleError, match="no rank plays stage 4"):
        schedule.rank_of(4)
