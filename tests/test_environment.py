"""The environment: one table of variables; what is no value is refused by the variable's name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tutti
from sources import tree_of
from tutti.comm.collectives.group import collective_timeout
from tutti.comm.posts.post import lease_seconds
from tutti.environment import (
    CHECK_NAN,
    KEEP_MEMORY,
    LEASE,
    LINGER,
    MOST_PROGRAMS,
    SHARED_MEMORY,
    TIMEOUT,
    VARIABLES,
    Seconds,
    check_seconds,
)
from tutti.errors import LayoutError, TuttiError

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


def test_no_other_file_names_a_variable_to_read_it() -> None:
    """In texts for people they may stand; a string that is a name alone is there to be read."""
    source = Path(tutti.__file__).parent
    found = [
        f"{path.relative_to(source)}:{node.lineno} {node.value}"
        for path in sorted(source.rglob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and re.fullmatch(r"TUTTI_\w+", str(node.value))
    ]
    known = [one.name for one in VARIABLES]
    assert [x.split()[1] for x in found] == known and len(set(known)) == len(known)
    assert all(x.startswith("environment.py:") for x in found)


def test_switches_and_counts() -> None:
    for text, on in (("1", True), ("yes", True), ("0", False), ("", False)):
        assert CHECK_NAN.read({CHECK_NAN.name: text}) == on
    assert KEEP_MEMORY.read({}) and not KEEP_MEMORY.read({KEEP_MEMORY.name: "0"})
    assert SHARED_MEMORY.read({SHARED_MEMORY.name: ""}) == SHARED_MEMORY.default
    assert MOST_PROGRAMS.read({MOST_PROGRAMS.name: "7"}) == 7
    with pytest.raises(TuttiError, match="TUTTI_MOST_PROGRAMS=0 is no number of programs"):
        MOST_PROGRAMS.read({MOST_PROGRAMS.name: "0"})
