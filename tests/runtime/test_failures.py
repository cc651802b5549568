"""Which rank made the others end, and what the report says, from records alone."""

from __future__ import annotations

from tutti.runtime.failures import RankEnd, exit_code, first_cause, report
from tutti.runtime.records import Exit, Failure, Place

CLOSED = "RuntimeError: Connection closed by peer"


def end(rank: int, code: int | None, failure: Failure | None = None, **more: object) -> RankEnd:
    place, ended = more.get("place"), more.get("ended")
    assert place is None or isinstance(place, Place)
    assert ended is None or isinstance(ended, Exit)
    return RankEnd(rank, code, failure, place, ended, None)


def lost(rank: int, seconds: float) -> Failure:
    where = {"line": "train.py:9", "collective": "all_reduce over data (8 B)"}
    return Failure(rank, "CommError", CLOSED, seconds, is_tutti=True, is_comm=True, **where)


def test_the_killed_rank_is_the_cause_though_others_reported_first() -> None:
    ends = [end(0, 1, lost(0, 1.0)), end(1, -9), end(2, 1, lost(2, 0.5))]
    assert first_cause(ends).rank == 1
    waits = [f"rank {rank} waited in all_reduce over data (8 B) at train.py:9" for rank in (0, 2)]
    assert report(ends) == f"CommError: rank 1 died (signal 9); {waits[0]}; {waits[1]}"
    assert exit_code(ends) == 1


def test_the_first_of_several_failures_is_shown_alone() -> None:
    failures = [
        Failure(r, "ValueError", f"ValueError: {r}", 10.0 - r, line="a.py:1") for r in (0, 1)
    ]
    ends = [end(0, 1, failures[0]), end(1, 1, failures[1])]
    assert report(ends) == "[rank 1] ValueError: 1"


def test_a_rank_that_left_in_good_order_is_the_cause_of_losses() -> None:
    ends = [end(0, 1, lost(0, 1.0)), end(1, None, ended=Exit(1, 0)), end(2, 143)]
    assert first_cause(ends).rank == 1
    assert "rank 1 left early (exit code 0); rank 0 waited in" in report(ends)
    assert exit_code(ends) == exit_code([ends[0], end(1, 143, ended=Exit(1, 0))]) == 1


def test_a_rank_stopped_elsewhere_is_shown_where_it_was() -> None:
    ends = [end(0, 143, place=Place(0, "data.py:3")), end(1, -11)]
    assert report(ends) == "CommError: rank 1 died (signal 11); rank 0 was at data.py:3"


def test_a_script_chooses_its_exit_code() -> None:
    ends = [end(0, 3, ended=Exit(0, 3)), end(1, 143)]
    assert report(ends) == "rank 0 ended (exit code 3)"
    assert exit_code(ends) == 3


def test_a_mistake_that_tutti_names_exits_with_2() -> None:
    failure = Failure(0, "LayoutError", "LayoutError: no", 1.0, is_tutti=True)
    assert exit_code([end(0, 1, failure)]) == 2
