"""Which rank made the others end, and what the report says, from records alone."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tutti.launch.failures import RankEnd, ended_by, exit_code, first_cause, report
from tutti.launch.guard import Seen
from tutti.launch.records import Exit, Failure, SavedLast, StoppedAt

CLOSED = "RuntimeError: Connection closed by peer"


def end(rank: int, code: int | None, failure: Failure | None = None, **more: object) -> RankEnd:
    place, ended, seen = more.get("place"), more.get("ended"), more.get("seen", Seen())
    assert place is None or isinstance(place, StoppedAt)
    assert ended is None or isinstance(ended, Exit)
    assert isinstance(seen, Seen)
    saved = more.get("saved")
    assert saved is None or isinstance(saved, SavedLast)
    return RankEnd(rank, code, failure, place, ended, None, seen, str(more.get("crash", "")), saved)


def raised(rank: int, seconds: float) -> Failure:
    text = "Traceback (most recent call last):\n  ...\nValueError: no"
    return Failure(rank, "ValueError", text, seconds, line="a.py:1", said="ValueError: no")


def late(rank: int, seconds: float) -> Failure:
    text = "CommError: rank 1 did not join rank 0 in all_reduce over data (8 B) within 3 s"
    where = {"line": "train.py:9", "collective": "all_reduce over data (8 B)"}
    return Failure(rank, "CommError", text, seconds, is_tutti=True, is_comm=True, **where)


def lost(rank: int, seconds: float) -> Failure:
    where = {"line": "train.py:9", "collective": "all_reduce over data (8 B)"}
    return Failure(rank, "CommError", CLOSED, seconds, is_tutti=True, is_comm=True, **where)


def test_the_killed_rank_is_the_cause_though_others_reported_first() -> None:
    ends = [end(0, 1, lost(0, 1.0)), end(1, -9), end(2, 1, lost(2, 0.5))]
    assert first_cause(ends).rank == 1
    waits = [f"rank {rank} waited in all_reduce over data (8 B) at train.py:9" for rank in (0, 2)]
    assert report(ends) == f"CommError: rank 1 died (signal 9); {waits[0]}; {waits[1]}"
    assert exit_code(ends) == 1


def test_an_error_of_gloo_outside_of_a_known_collective_has_a_cause_elsewhere() -> None:
    text = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
    gloo = Failure(0, "RuntimeError", text, 0.5, line="train.py:9")
    assert first_cause([end(0, 1, gloo), end(1, -9, seen=Seen(ended=0.7))]).rank == 1
    own = Failure(0, "OSError", "OSError: Connection reset by peer", 0.5, line="train.py:9")
    assert first_cause([end(0, 1, own), end(1, -9, seen=Seen(ended=0.7))]).rank == 0


def test_a_rank_that_others_waited_for_had_left_in_good_order() -> None:
    ends = [end(0, 1, late(0, 9.0)), end(1, 0, ended=Exit(1, 0, 2.0))]
    assert first_cause(ends).rank == 1 and exit_code(ends) == 1
    assert first_cause([ends[0], end(1, 0, ended=Exit(1, 0, 9.5))]).rank == 0


def test_the_first_of_several_failures_is_shown_alone() -> None:
    failures = [
        Failure(r, "ValueError", f"ValueError: {r}", 10.0 - r, line="a.py:1") for r in (0, 1)
    ]
    ends = [end(0, 1, failures[0]), end(1, 1, failures[1])]
    assert report(ends) == "rank 1 failed (ValueError)\n[rank 1] ValueError: 1"


def test_a_rank_that_left_in_good_order_is_the_cause_of_losses() -> None:
    ends = [end(0, 1, lost(0, 1.0)), end(1, None, ended=Exit(1, 0)), end(2, 143)]
    assert first_cause(ends).rank == 1
    assert "rank 1 left early (exit code 0); rank 0 waited in" in report(ends)
    assert exit_code(ends) == exit_code([ends[0], end(1, 143, ended=Exit(1, 0))]) == 1


def test_a_rank_stopped_elsewhere_is_shown_where_it_was() -> None:
    ends = [end(0, 143, place=StoppedAt(0, "data.py:3")), end(1, -11)]
    assert report(ends) == "CommError: rank 1 died (signal 11, SIGSEGV); rank 0 was at data.py:3"


def test_a_script_chooses_its_exit_code() -> None:
    ends = [end(0, 3, ended=Exit(0, 3)), end(1, 143)]
    assert report(ends) == "rank 0 ended (exit code 3)"
    assert exit_code(ends) == 3


def test_a_script_that_fails_by_itself_is_told_from_a_lost_one() -> None:
    failure = Failure(0, "LayoutError", "LayoutError: no", 1.0, is_tutti=True)
    own = [end(0, 1, raised(0, 5.0)), end(0, 1, failure), end(0, 3, ended=Exit(0, 3))]
    assert all(one.is_of_script for one in own)
    others = [end(0, -9), end(0, 1, lost(0, 1.0)), end(0, 1, late(0, 9.0)), end(0, 0), end(0, 143)]
    others += [end(0, 143, ended=Exit(0, 143)), end(0, 0, ended=Exit(0, 0)), end(0, 3)]
    assert not any(one.is_of_script for one in others)


def test_a_mistake_that_tutti_names_exits_with_2() -> None:
    failure = Failure(0, "LayoutError", "LayoutError: no", 1.0, is_tutti=True)
    assert exit_code([end(0, 1, failure)]) == 2


def lost_in_a_save(rank: int, seconds: float) -> Failure:
    text = "CommError: rank 1 is gone; it left rank 0 in a save or a load\n  why  Connection reset by peer"
    return Failure(
        rank, "CommError", text, seconds, is_tutti=True, is_comm=True, line="train.py:12"
    )


def unanswered(rank: int, seconds: float) -> Failure:
    text = "CommError: no answer from server 0 for 10 s\n  why  it cannot be reached (Connection refused)"
    return Failure(rank, "CommError", text, seconds, is_tutti=True, is_comm=True, line="train.py:9")


def in_vain(rank: int, seconds: float, collective: str = "barrier") -> Failure:
    said = "RuntimeError: [/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv"
    text = f"Traceback (most recent call last):\n  ...\n{said}"
    more: Any = {"line": "train.py:7", "collective": collective, "said": said}
    return Failure(rank, "RuntimeError", text, seconds, **more)


WAITS = "rank 0 waited in all_reduce over data (8 B) at train.py:9"
ENDS: dict[str, tuple[list[RankEnd], str]] = {
    "an exception beats a rank that the launcher killed": (
        [end(0, 1, raised(0, 5.0)), end(1, -9, seen=Seen(15.0, killed=True))],
        "rank 0 failed: ValueError: no",
    ),
    "an exception beats one that was deaf to the launcher's SIGTERM and had waited before": (
        [end(0, -9, seen=Seen(2.0, killed=True)), end(1, 1, raised(1, 5.0))],
        "rank 1 failed: ValueError: no",
    ),
    "stopped, while the other waited until the time-out": (
        [end(0, 1, late(0, 9.0)), end(1, -9, seen=Seen(20.0, 3.0, killed=True))],
        "CommError: rank 1 was stopped (SIGSTOP) and did not go on; the launcher has killed it; "
        + WAITS,
    ),
    "stopped, while the other failed by itself": (
        [end(0, 1, raised(0, 9.0)), end(1, -9, seen=Seen(20.0, 3.0, killed=True))],
        "rank 0 failed: ValueError: no; rank 1 was stopped (SIGSTOP) and did not go on; "
        "the launcher has killed it",
    ),
    "stopped for a while only": (
        [end(0, 1, late(0, 9.0)), end(1, -9, seen=Seen(9.5, shortage="by X"))],
        "[rank 0] CommError: rank 1 did not join rank 0 in all_reduce over data (8 B) within 3 s",
    ),
    "SIGTERM by somebody else; the others lost a peer and were stopped": (
        [end(0, 1, lost(0, 2.5)), end(1, 143, place=StoppedAt(1, "", "", 2.0)), end(2, 143)],
        "CommError: rank 1 was ended by SIGTERM, which the launcher did not send; " + WAITS,
    ),
    "SIGINT by somebody else": (
        [end(0, 1, lost(0, 2.5)), end(1, 130, ended=Exit(1, 130, 2.0))],
        "CommError: rank 1 was interrupted by SIGINT, which the launcher did not send; " + WAITS,
    ),
    "the kernel, perhaps": (
        [end(0, 1, lost(0, 2.5)), end(1, -9, seen=Seen(2.0, shortage="perhaps out of memory"))],
        "CommError: rank 1 died (signal 9), perhaps out of memory; " + WAITS,
    ),
    "os._exit": (
        [end(0, 1, lost(0, 2.5)), end(1, 3, seen=Seen(2.0))],
        "CommError: rank 1 ended (exit code 3, without Python's exit, as by os._exit); " + WAITS,
    ),
    "os._exit(0) in the middle of a step of the others": (
        [end(0, 1, lost(0, 2.5)), end(1, 0, seen=Seen(2.6))],
        "CommError: rank 1 ended (exit code 0, without Python's exit, as by os._exit); " + WAITS,
    ),
    "os._exit(0), and the others waited for it": (
        [end(0, 1, late(0, 9.0)), end(1, 0, seen=Seen(2.0))],
        "CommError: rank 1 ended (exit code 0, without Python's exit, as by os._exit); " + WAITS,
    ),
    "os._exit(0) after the failure of another": (
        [end(0, 1, late(0, 9.0)), end(1, 0, seen=Seen(12.0))],
        "[rank 0] CommError: rank 1 did not join rank 0 in all_reduce over data (8 B) within 3 s",
    ),
    "a server that came back too late, and left once its workers had failed": (
        [
            end(0, 1, unanswered(0, 9.0)),
            end(1, 1, unanswered(1, 9.1)),
            end(2, 0, ended=Exit(2, 0, 15)),
        ],
        "[rank 0] CommError: no answer from server 0 for 10 s",
    ),
    "a barrier of one rank's own, and the other waited in a step": (
        [end(0, 1, late(0, 9.1)), end(1, 1, in_vain(1, 9.0))],
        "CommError: rank 0 did not join rank 1 in barrier at train.py:7 within 12 s; " + WAITS,
    ),
    "another collective of some ranks, and one slept": (
        [
            end(0, 143, place=StoppedAt(0, "io.py:3")),
            *(end(r, 1, in_vain(r, 9.0 + r, "")) for r in (1, 2)),
        ],
        "CommError: rank 0 did not join rank 1 in a collective of torch.distributed at train.py:7 "
        "within 12 s; rank 0 was at io.py:3; rank 2 was at train.py:7",
    ),
    "a barrier while another rank was stopped": (
        [end(0, 1, in_vain(0, 9.0)), end(1, -9, seen=Seen(20.0, 3.0, killed=True))],
        "CommError: rank 1 was stopped (SIGSTOP) and did not go on; the launcher has killed it; "
        "rank 0 waited in barrier at train.py:7",
    ),
    "sys.exit": (
        [end(0, 1, lost(0, 2.5)), end(1, 3, ended=Exit(1, 3, 2.0))],
        "CommError: rank 1 ended (exit code 3); " + WAITS,
    ),
    "killed in a save, seen later than the other lost it": (
        [end(0, 1, lost_in_a_save(0, 2.0)), end(1, -9, seen=Seen(2.5))],
        "CommError: rank 1 died (signal 9); rank 0 was at train.py:12",
    ),
    "two deaths": (
        [end(0, -6, seen=Seen(3.0)), end(1, -11, seen=Seen(2.0))],
        "CommError: rank 1 died (signal 11, SIGSEGV)",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_first_line_is_the_first_cause_in_time(name: str) -> None:
    ends, line = ENDS[name]
    assert report(ends).splitlines()[0] == line
    assert report(ends[::-1]).splitlines()[0] == line


def test_a_traceback_follows_the_first_line() -> None:
    failed: list[Any] = report([end(0, 1, raised(0, 1.0))]).splitlines()
    assert failed[:2] == [
        "rank 0 failed: ValueError: no",
        "[rank 0] Traceback (most recent call last):",
    ]
    crashed = report([end(0, -11, crash="Fatal Python error: Segmentation fault\n  File x")])
    assert crashed.splitlines()[1:] == [
        "[rank 0] Fatal Python error: Segmentation fault",
        "  File x",
    ]


def test_a_wait_in_vain_has_a_fix_and_the_line_of_the_script() -> None:
    lines = report([end(0, 1, late(0, 9.1)), end(1, 1, in_vain(1, 9.0))]).splitlines()
    assert lines[1].startswith("  why  all ranks") and "take it out of `if rank == 0:`" in lines[2]
    assert lines[3] == "[rank 1] Traceback (most recent call last):"


def test_a_signal_to_the_launcher_is_told_as_that() -> None:
    ends = [end(0, None, place=StoppedAt(0, "a.py:1", "", 1.0)), end(1, None)]
    assert (
        ended_by(signal.SIGTERM, ends)
        == "ended by SIGTERM, sent to the launcher; rank 0 was at a.py:1"
    )


def test_ranks_that_end_by_themselves_after_a_signal_have_not_waited() -> None:
    """A rank notes its place when the signal comes; it may save and end after that."""
    place = {"place": StoppedAt(0, "train.py:9", "all_gather", 1.0)}
    saved = [end(r, None, **place, ended=Exit(r, 0, 2.0), saved=SavedLast(r, 4)) for r in (0, 1)]
    ends = [
        *saved,
        end(2, None, **place, ended=Exit(2, 0, 2.0)),
        end(3, None, **place, ended=Exit(3, 143, 2.0)),
        *(end(rank, None, **place) for rank in (4, 5)),
    ]
    assert ended_by(signal.SIGTERM, ends) == (
        "ended by SIGTERM, sent to the launcher; ranks 0, 1 saved step 4 and ended; "
        "rank 2 ended (exit code 0); rank 4 waited in all_gather at train.py:9; "
        "rank 5 waited in all_gather at train.py:9"
    )
