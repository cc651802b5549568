"""Contenders side by side: processes that are built once and then take turns.

A *crew* is the processes of one way. All crews of a model stand ready at once, blocked on their pipes but
for the one whose turn it is; in each *round* every crew has one *turn* of a few steps. What else the machine
does then hits all of them alike.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.contenders.contender import Way
from benchmarks.memory import Peak, available_nbytes, data_nbytes
from benchmarks.models import Case, num_parameters
from benchmarks.worker import Failed, Steps, serve

ANSWER_SECONDS = 300.0
SAMPLE_SECONDS = 0.002
MEMORY_STEPS = 3
# For each parameter: weight, gradient, two moments, and as much again for what is under way.
STATE_NBYTES, SPARE_NBYTES = 20, 10**9
# As every rank is meant to run: one thread, on the loopback interface.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class Unable(Exception):
    """A way cannot train a model, or failed at it."""


class Crew:
    """The processes of one way for one model, started but not built."""

    def __init__(self, case: Case, way: Way) -> None:
        self.case, self.way = case, way
        self._dir = tempfile.TemporaryDirectory(prefix="bench-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._baseline: dict[int, int] = {}
        context = multiprocessing.get_context("spawn")
        os.environ |= ENVIRONMENT
        for rank in range(way.num_ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(there, case, way, rank, self._dir.name), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def ready(self) -> None:
        """Wait until everything is imported and the ranks have met; note the memory held so far."""
        self._answers()
        self._baseline = {pid: data_nbytes(pid) for pid in self.pids}

    def build(self) -> float:
        """Build the model, once ready; seconds of the slower rank."""
        return max(self.ask("build"))

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [process.pid for process in self._processes]

    def steps(self, count: int, *, meanwhile: Callable[[], None] | None = None) -> list[Steps]:
        """`count` steps on every rank."""
        return self.ask("steps", count, meanwhile=meanwhile)

    def turn(self, count: int) -> float:
        """The slower rank's median seconds over `count` steps."""
        return max(statistics.median(rank.seconds) for rank in self.steps(count))

    def peak_nbytes(self) -> int:
        """The most memory that a rank holds in a few steps, over what it held before it was built."""
        peak = Peak(self.pids)
        self.steps(MEMORY_STEPS, meanwhile=peak)
        most = max(nbytes - self._baseline[pid] for pid, nbytes in peak.nbytes.items())
        return most // self.way.devices_per_process

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(contender, *args)` on every rank; it must stand at the top of a module."""
        return self.ask("call", function, args)

    def ask(self, *request: Any, meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """Every rank's answer; `meanwhile` is called again and again until they are there.

        Raises:
            Unable: a rank failed, ended, or does not answer.
        """
        for pipe in self._pipes:
            pipe.send(request)
        while meanwhile and len(wait(self._pipes, SAMPLE_SECONDS)) < len(self._pipes):
            if not all(process.is_alive() for process in self._processes):
                break
            meanwhile()
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = [self._answer(rank) for rank in range(len(self._pipes))]
        for answer in answers:
            if isinstance(answer, Failed):
                raise Unable(answer.text)
        return answers

    def _answer(self, rank: int) -> Any:
        try:
            if self._pipes[rank].poll(ANSWER_SECONDS):
                return self._pipes[rank].recv()
        except (EOFError, OSError):
            return Failed(f"rank {rank} ended")
        return Failed(f"rank {rank} gave no answer within {ANSWER_SECONDS:g} s")

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        self._dir.cleanup()


@dataclass
class Entry:
    """What one way did with one model; `error` says why not, where it did not.

    `seconds` holds one number a round; `losses` those of the first steps, over the global batch.
    """

    way: str
    num_ranks: int
    units: int
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    build_seconds: float = 0.0
    num_steps: int = 0
    peak_nbytes: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def median(self) -> float:
        """Median seconds a step."""
        return statistics.median(self.seconds)

    def with_more(self, other: Entry) -> Entry:
        """The rounds of two races of the same way; what failed in either has failed."""
        if self.error or other.error:
            return replace(self, seconds=[], error=self.error or other.error)
        return replace(
            self,
            seconds=self.seconds + other.seconds,
            peak_nbytes=max(self.peak_nbytes, other.peak_nbytes),
            shares={k: max(x, other.shares.get(k, x)) for k, x in self.shares.items()},
        )

    @property
    def quartiles(self) -> tuple[float, float]:
        """The middle half of the rounds lies between these."""
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often and how long."""

    num_rounds: int = 7
    turn_seconds: float = 0.7
    num_warm: int = 3
    num_builds: int = 1

    def steps_per_turn(self, seconds: float) -> int:
        """As many steps of `seconds` as fill a turn; one at least."""
        return max(1, round(self.turn_seconds / seconds))


Tell = Callable[[str], None]
# Measured once more on a crew after the rounds; a name for each number.
Extra = Callable[[Crew], dict[str, float]]


def race(
    case: Case, ways: Sequence[Way], *, pace: Pace, tell: Tell, extra: Extra | None = None
) -> list[Entry]:
    """Every way on one model, in turns; entries in the order of `ways`."""
    entries = [Entry(way.name, way.num_ranks, case.units(way.num_shares)) for way in ways]
    crews = [Crew(case, way) for way in ways]
    running = list(zip(crews, entries, strict=True))
    try:
        tell("start")
        # All of them first: who starts takes time from who is measured.
        running = _each(running, lambda crew, _: crew.ready())
        running = _each(running, lambda crew, entry: _warm_up(crew, entry, pace, tell))
        for number in range(pace.num_rounds):
            tell(f"round {number + 1} of {pace.num_rounds}")
            # Another order each time: nobody always follows the same one, with its caches.
            random.Random(number).shuffle(running)
            running = _each(running, lambda crew, entry: _take_turn(crew, entry))
        _each(running, lambda crew, entry: _look_closer(crew, entry, extra, tell))
    finally:
        for crew in crews:
            crew.close()
    return entries


def _each(
    running: Iterable[tuple[Crew, Entry]], action: Callable[[Crew, Entry], None]
) -> list[tuple[Crew, Entry]]:
    """The action on each crew in turn; those that can go on. The others are closed."""
    able = []
    for crew, entry in running:
        try:
            action(crew, entry)
            able.append((crew, entry))
        except Unable as error:
            entry.error = str(error)
            crew.close()
    return able


def _warm_up(crew: Crew, entry: Entry, pace: Pace, tell: Tell) -> None:
    tell(f"{entry.way}: build and first steps")
    _check_memory(crew)
    entry.build_seconds = crew.build()
    first = crew.steps(pace.num_warm)
    entry.losses = [statistics.fmean(x) for x in zip(*(r.losses for r in first), strict=True)]
    # Not the first step, which compiles.
    entry.num_steps = pace.steps_per_turn(max(min(r.seconds) for r in first))


def _check_memory(crew: Crew) -> None:
    """All crews of a model hold memory at once: one too many must not end the others, or the machine."""
    with torch.device("meta"):
        nbytes = STATE_NBYTES * num_parameters(crew.case.make())
    needed = SPARE_NBYTES + nbytes * crew.way.num_ranks * crew.way.devices_per_process
    left = available_nbytes()
    if left < needed:
        raise Unable(
            f"left out: {left / 1e9:.1f} GB of memory left, {needed / 1e9:.1f} GB may be needed"
        )


def _take_turn(crew: Crew, entry: Entry) -> None:
    entry.seconds.append(crew.turn(entry.num_steps))


def _look_closer(crew: Crew, entry: Entry, extra: Extra | None, tell: Tell) -> None:
    tell(f"{entry.way}: memory")
    entry.peak_nbytes = crew.peak_nbytes()
    try:
        entry.shares = extra(crew) if extra else {}
    except Unable as error:  # the times stand all the same
        tell(f"{entry.way}: {error}")
