"""The harness with contenders that only sleep: turns, the slower rank, memory, failures."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Crew, Entry, Pace, race
from ranks import context
from tests.benchmarks.tiny import (
    ABSENT,
    GPT,
    HELD_NBYTES,
    KILLER,
    RAISER,
    SECONDS,
    SLEEPER,
    Sleeper,
)

ROOT = Path(__file__).parents[2]
PACE = Pace(num_rounds=3, turn_seconds=4 * SECONDS, num_warm=2)


def count_of(contender: Sleeper) -> int:
    return contender.count


def quiet(_text: str) -> None:
    """Tells nobody."""


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    """Of fresh processes, whose memory is measured, and of copies of one that has imported."""
    ways = [SLEEPER, RAISER, KILLER, ABSENT]
    starts = iter([multiprocessing.get_context("spawn"), *([context()] * 3)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(harness.multiprocessing, "get_context", lambda _method: next(starts))
        found = race(GPT, ways, pace=PACE, tell=quiet, extra=counts)
    return {entry.way: entry for entry in found}


def counts(crew: Crew) -> dict[str, float]:
    return {"steps": max(crew.call(count_of))}


def test_each_round_gives_one_number_of_the_slower_rank(entries: dict[str, Entry]) -> None:
    entry = entries["sleeper"]
    assert entry.error == "" and len(entry.seconds) == PACE.num_rounds
    assert min(entry.seconds) >= 2 * SECONDS  # a sleep is never shorter


def test_losses_are_the_mean_over_the_ranks(entries: dict[str, Entry]) -> None:
    assert entries["sleeper"].losses == [0.5] * PACE.num_warm


def test_memory_is_what_the_contender_holds(entries: dict[str, Entry]) -> None:
    held = entries["sleeper"].peak_nbytes
    assert HELD_NBYTES <= held < 1.5 * HELD_NBYTES


def test_the_extra_sees_the_same_processes(entries: dict[str, Entry]) -> None:
    entry = entries["sleeper"]
    in_rounds = PACE.num_rounds * entry.num_steps
    assert entry.shares["steps"] >= PACE.num_warm + in_rounds


def test_a_contender_that_fails_leaves_the_others(entries: dict[str, Entry]) -> None:
    assert "ValueError: the fifth step is one too many" in entries["raiser"].error
    assert entries["killer"].error == "rank 1 ended"
    assert entries["absent"].error == "unheard-of is not installed"


def test_a_crew_for_which_memory_is_short_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = context()
    monkeypatch.setattr(harness.multiprocessing, "get_context", lambda _method: copies)
    monkeypatch.setattr(harness, "available_nbytes", lambda: harness.SPARE_NBYTES)
    (entry,) = race(GPT, [replace(SLEEPER, num_ranks=1)], pace=PACE, tell=quiet)
    assert entry.error.startswith("left out: 1.0 GB of memory left, 1.0 GB") and not entry.seconds


def test_rounds_of_several_builds_are_put_together() -> None:
    one = Entry("a", 2, 4, [1.0, 2.0], peak_nbytes=5, shares={"outside": 0.1})
    two = Entry("a", 2, 4, [3.0], peak_nbytes=7, shares={"outside": 0.2})
    both = one.with_more(two)
    assert both.seconds == [1.0, 2.0, 3.0] and both.peak_nbytes == 7
    assert both.shares == {"outside": 0.2}
    failed = Entry("a", 2, 4, error="no memory")
    for joined in (one.with_more(failed), failed.with_more(one)):
        assert joined.error == "no memory" and joined.seconds == []


def test_steps_per_turn() -> None:
    assert Pace(turn_seconds=1.0).steps_per_turn(0.24) == 4
    assert Pace(turn_seconds=1.0).steps_per_turn(30.0) == 1


def test_quartiles() -> None:
    entry = Entry("x", 1, 1, seconds=[5.0, 1.0, 2.0, 4.0, 3.0])
    assert entry.median == 3.0 and entry.quartiles == (2.0, 4.0)
    assert Entry("x", 1, 1, seconds=[5.0]).quartiles == (5.0, 5.0)


def test_memory_counts_data_and_not_files(tmp_path: Path) -> None:
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(40_000_000)
    # A fresh interpreter: this process may be a copy, whose share of a page changes as other copies end.
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    by_data, by_file = map(int, done.stdout.split())
    assert 40_000_000 <= by_data < 41_000_000
    assert -1_000_000 < by_file < 1_000_000


# Prints by how much it grows, in bytes, with 40 MB of data, then with the file it is given, read in place.
GROWTH = """
import mmap, os, sys
from benchmarks.memory import data_nbytes

data_nbytes(os.getpid())
before = data_nbytes(os.getpid())
data = bytearray(b"1") * 40_000_000
with_data = data_nbytes(os.getpid())
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
assert len(mapped) == 40_000_000 and mapped.find(b"1") == -1
print(with_data - before, data_nbytes(os.getpid()) - with_data)
"""
