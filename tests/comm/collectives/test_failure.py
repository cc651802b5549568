"""What a `CommError` says: who waits, in which collective, for whom."""

from __future__ import annotations

import pytest

from tutti.comm.collectives.failure import called_alone, comm_error, lost_peer, with_line
from tutti.comm.collectives.group import Group

PAIR = Group(None, (2, 5), 0, None)
FOUR = Group(None, (0, 1, 2, 3), 2, None)
CLOSED = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:4711\nmore")


def test_a_pair_knows_who_is_gone() -> None:
    error = comm_error(CLOSED, "all_reduce", ("data",), 4_200_000, PAIR)
    assert error.what == "rank 5 is gone; it left rank 2 in all_reduce over data (4.2 MB)"
    assert error.why == "Connection closed by peer [127.0.0.1]:4711"


def test_a_larger_group_names_those_it_can_be() -> None:
    error = comm_error(CLOSED, "all_gather", ("data", "tensor"), 12, FOUR)
    assert error.what.startswith("one of ranks 0, 1, 3 is gone; it left rank 2 in all_gather over ")
    assert "data, tensor (12 B)" in error.what


def test_a_timeout_says_how_long_and_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_TIMEOUT", "2.5")
    error = comm_error(RuntimeError("Timed out waiting 2500ms"), "all_reduce", ("data",), 8, PAIR)
    assert "rank 5 did not join rank 2 in all_reduce over data (8 B) within 2.5 s" in error.what
    assert "TUTTI_TIMEOUT" in error.fix
    assert (
        error.why == "the wait has timed out"
    )  # not the engine's words, and no place in its source


def test_a_call_of_one_rank_alone_is_told_so() -> None:
    late = comm_error(RuntimeError("Timed out waiting 2500ms"), "all_gather", ("data",), 8, PAIR)
    error = called_alone(late, "all ranks save together", "train.py:12")
    assert (error.what, error.at, error.why) == (
        late.what,
        "train.py:12",
        "all ranks save together",
    )
    assert error.fix.startswith("call it on every rank") and error.fix.endswith(late.fix)
    gone = comm_error(CLOSED, "all_gather", ("data",), 8, PAIR)
    assert called_alone(gone, "all ranks save together") is gone


def test_the_line_is_added_later() -> None:
    error = with_line(comm_error(CLOSED, "all_reduce", ("data",), 8, PAIR), "train.py:12")
    assert str(error).splitlines()[1] == "  at   train.py:12"


def test_messages() -> None:
    assert lost_peer("Read error: Connection reset by peer") and not lost_peer("shape mismatch")
