"""The error that a rank reports is its first one: a save in `finally` fails since the others do not come."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tutti.errors import CommError
from tutti.launch.worker import _failure


def gathers() -> None:
    """As `tutti.whole`, for which no other rank comes."""
    try:
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:129] Timed out")
    except RuntimeError as error:
        raise CommError("rank 0 did not join rank 1 in the gathering of weights") from error


def in_finally() -> None:
    try:
        raise ValueError("corrupt sample 27")
    finally:
        gathers()


def in_except() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        gathers()


def after_another_wait() -> None:
    try:
        gathers()
    finally:
        gathers()


def translated() -> None:
    try:
        raise KeyError("name")
    except KeyError as error:
        raise ValueError("a batch of the wrong kind") from error


@pytest.mark.parametrize(
    ("fails", "kind", "is_comm"),
    [
        (gathers, "CommError", True),
        (in_finally, "ValueError", False),
        (in_except, "KeyboardInterrupt", False),
        (after_another_wait, "CommError", True),
        (translated, "ValueError", False),
    ],
)
def test_the_first_error_of_a_rank(fails: Callable[[], None], kind: str, is_comm: bool) -> None:
    with pytest.raises(BaseException) as caught:
        fails()
    found = _failure(caught.value, 1, 2.0)
    assert (found.kind, found.is_comm, found.rank, found.seconds) == (kind, is_comm, 1, 2.0)
