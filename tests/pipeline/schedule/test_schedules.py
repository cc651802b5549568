"""Every named schedule can be played, on any number of ranks, micro-batches and chunks."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest

from tutti.errors import ScheduleError
from tutti.pipeline.schedule.schedules import SCHEDULES, schedule
from tutti.pipeline.schedule.validate import validate
from tutti.planner.simulator import simulate
from tutti.report.timeline import staircase

KINDS = [("gpipe", 1), ("1f1b", 1), ("zb", 1), ("zbv", 2), *(("interleaved", v) for v in (1, 2, 3))]
SIZES = [(p, m) for p in range(1, 9) for m in range(1, 17)]


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_every_schedule_can_be_played(name: str, chunks: int) -> None:
    for p, m in SIZES:
        made = schedule(name, p, m, chunks)
        assert (made.num_ranks, made.num_stages, made.num_micro) == (p, p * chunks, m)
        report = validate(made)
        # What the pass added is checked, too, against what has to be moved and in order.
        assert validate(report.schedule) == report
        assert max(report.peak_live_of_stage) <= m


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_without_buffers_only_gpipe_can_be_played(name: str, chunks: int) -> None:
    """One that sends forward while its neighbor sends back waits forever; GPipe never does both at once,
    nor does one micro-batch."""
    for p, m in SIZES:
        made = schedule(name, p, m, chunks)
        if name == "gpipe" or p == 1 or m == 1:
            validate(made, blocking_sends=True)
        else:
            with pytest.raises(ScheduleError, match=r"deadlock: \d ranks wait for each other"):
                validate(made, blocking_sends=True)


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_each_stage_computes_once_on_each_micro_batch(name: str, chunks: int) -> None:
    """Counted without the validator."""
    for p, m in SIZES[::7]:
        made = schedule(name, p, m, chunks)
        kinds = "FIW" if name in ("zb", "zbv") else "FB"
        expected = [(k, s, i) for k in kinds for s in range(p * chunks) for i in range(m)]
        found = Counter((a.kind, a.stage, a.micro) for row in made.rows for a in row)
        assert found == Counter(expected)


def test_where_stages_lie() -> None:
    assert schedule("zbv", 3, 6).stages_of(0) == (0, 5)
    assert schedule("zbv", 3, 6).stages_of(2) == (2, 3)
    assert schedule("interleaved", 3, 6, 3).stages_of(1) == (1, 4, 7)
    assert schedule("interleaved", 5, 7, 1) == schedule("1f1b", 5, 7)


DRAWN = [("gpipe", 4, 3, 1), ("1f1b", 4, 4, 1), ("zb", 4, 4, 1), ("zbv", 2, 3, 2)]
DRAWN += [("interleaved", 2, 3, 2)]


@pytest.mark.parametrize(("name", "p", "m", "v"), DRAWN)
def test_the_docstrings_draw_what_is_played(name: str, p: int, m: int, v: int) -> None:
    drawing = staircase(simulate(schedule(name, p, m, v), {"F": 1, "I": 1, "W": 1}))
    lines = [line.strip() for line in (inspect.getdoc(SCHEDULES[name]) or "").split("\n")]
    assert set(drawing.split("\n")) <= set(lines)


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("zbb", 2, 2), 'unknown schedule "zbb"', "did you mean zb?"),
        (("gpipe", 0, 2), "0 ranks for schedule gpipe", "1 or more ranks"),
        (("zb", 2, -1), "-1 micro-batches for schedule zb", "1 or more micro-batches"),
        (("interleaved", 2, 2, 0), "0 chunks for", "1 or more chunks"),
        (("1f1b", 2, 2, 2), "schedule 1f1b cannot have 2 chunks", "schedule interleaved, or 1"),
        (("zbv", 2, 2, 3), "schedule zbv cannot have 3 chunks", "schedule interleaved"),
    ],
)
def test_what_there_is_not_is_refused(arguments: tuple, what: str, fix: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule(*arguments)
    assert what in caught.value.what and fix in caught.value.fix
