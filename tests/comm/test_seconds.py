"""Seconds in the environment: numbers are taken, anything else is refused by the variable's name."""

from __future__ import annotations

import pytest

from tutti.comm.group import collective_timeout
from tutti.comm.post import lease_seconds
from tutti.comm.seconds import LEASE, LINGER, TIMEOUT, Seconds, check_seconds
from tutti.errors import LayoutError

ODD = [
    "",
    " ",
    "abc",
    "-1",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e9",
    "1_0",
    "0x10",
    "5 s",
    "\u0665",
]
SECONDS = (TIMEOUT, LEASE, LINGER)


@pytest.mark.parametrize("one", SECONDS, ids=lambda one: one.name)
@pytest.mark.parametrize("text", ODD)
def test_what_is_no_number_of_seconds_is_refused(one: Seconds, text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        check_seconds({one.name: text})
    assert caught.value.what == f'{one.name}="{text}" is not a number of seconds'
    assert caught.value.fix.startswith(f"{one.name}=")


@pytest.mark.parametrize("one", SECONDS, ids=lambda one: one.name)
def test_numbers_are_taken(one: Seconds) -> None:
    for text, seconds in (("2.5", 2.5), (" 7 ", 7.0), ("1e3", 1000.0), ("+.5", 0.5), ("1e8", 1e8)):
        assert one.read({one.name: text}) == seconds
    assert one.read({}) == one.default


def test_only_a_server_may_wait_for_nobody() -> None:
    assert LINGER.read({LINGER.name: "0"}) == 0
    for one in (TIMEOUT, LEASE):
        with pytest.raises(LayoutError, match="more than 0"):
            one.read({one.name: "0"})


def test_they_are_read_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_TIMEOUT", "1.5")
    monkeypatch.setenv("TUTTI_LEASE", "inf")
    assert collective_timeout().total_seconds() == 1.5
    with pytest.raises(LayoutError, match='TUTTI_LEASE="inf"'):
        lease_seconds()
