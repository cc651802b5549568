"""Whatever ends a run, the first line of the report is its first cause, and nothing is left behind.

A run that is suspended as a whole is not ended by that.

Every cause under every layout on either rank, and signals to the launcher. The suite plays a part of them in
which each cause and each layout occurs; `ALL_CAUSES=1 pytest tests/launch/test_causes.py` plays all.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from forked import Started, started
from launch.processes import lives
from launch.suspended import Ended, suspended

SCRIPT = Path(__file__).parent / "causes.py"
RUN_SECONDS, START_SECONDS, LEFT_SECONDS = 180.0, 120.0, 30.0
# Long enough for two ranks to come to their first step on a busy machine.
SHORT_TIMEOUT = "10"

DATA, PIPE = "data=2", "pipe=2 micro=2"
REPLICAS, SERVED = "replica=2 sync=diloco(every=2)", "replica=2 server=1 sync=async"
LAYOUTS = (DATA, PIPE, REPLICAS, SERVED)

WAITED = r"; rank \d waited in \w+ over .+ at \S*causes\.py:\d+"
NOT_SENT = ", sent neither by the launcher nor by the kernel for want of memory"
# After "rank 1 ", or "worker 1 " where others go on.
SAID = {
    "exception": "failed: ValueError: a batch of the wrong kind",
    "exception in a wait": "failed: ValueError: a batch of the wrong kind",
    "MemoryError": "failed: MemoryError: no room for a list",
    "SIGKILL": rf"died \(signal 9\)({NOT_SENT}|, not sent by the launcher)",
    "SIGSTOP": r"was stopped \(SIGSTOP\) and did not go on; the launcher has killed it",
    "SIGTERM": "was ended by SIGTERM, which the launcher did not send",
    "segfault": r"died \(signal 11, SIGSEGV\)",
    "sys.exit": r"ended \(exit code 3\)",
    "os._exit": r"ended \(exit code 3, without Python's exit, as by os\._exit\)",
    "sleep": "",
}
# What ranks say while the run goes on, before there is a report.
NOTE = re.compile(r"replica \d (is lost|has left)|.*UserWarning: |rank \d has waited |  ")
LAUNCHER = ("SIGTERM", "SIGINT", "SIGKILL")
# A rank that hangs in its own program holds up only itself where replicas are apart.
APART = (REPLICAS, SERVED)
# What replicas that are apart go on after; under servers all of it.
LOSSES = ("SIGKILL", "SIGSTOP", "segfault")


class Case(NamedTuple):
    """What goes wrong, where ("0", "1", "launcher"), under which layout."""

    cause: str
    where: str
    layout: str

    def __str__(self) -> str:
        return f"{self.cause}, {self.where}, {self.layout.split(' ')[0]}"


EVERY = [
    Case(cause, where, layout)
    for layout in LAYOUTS
    for where in ("0", "1", "launcher")
    for cause in (LAUNCHER if where == "launcher" else SAID)
    if not (cause == "sleep" and layout in APART)
    if not (cause == "exception in a wait" and layout == SERVED)  # nobody waits there
]
PART = [
    Case("exception in a wait", "1", DATA),
    Case("SIGKILL", "0", DATA),
    Case("SIGTERM", "1", DATA),
    Case("segfault", "1", DATA),
    Case("SIGINT", "launcher", DATA),
    Case("exception", "0", PIPE),
    Case("sys.exit", "1", PIPE),
    Case("SIGKILL", "launcher", PIPE),
    Case("SIGKILL", "1", REPLICAS),
    Case("MemoryError", "0", REPLICAS),
    Case("os._exit", "1", REPLICAS),
    Case("exception", "1", SERVED),
    Case("segfault", "0", SERVED),
    Case("SIGTERM", "launcher", SERVED),
    Case("SIGSTOP", "1", DATA),
    Case("sleep", "0", PIPE),
]
# Its server and a worker are fresh interpreters; all others are copies (forked.py).
FRESH, FRESH_ROLES = Case("segfault", "0", SERVED), ("server 0", "worker 0")
ALL = os.environ.get("ALL_CAUSES") == "1"


def goes_on(case: Case) -> bool:
    """Whether the other replica, or worker, goes on without this one."""
    return case.layout == SERVED or (case.layout == REPLICAS and case.cause in LOSSES)


def first_line(case: Case) -> str:
    """A pattern for the first line of the report."""
    if case.where == "launcher":
        return f"ended by {case.cause}, sent to the launcher(; rank .*)?"
    rank, other = case.where, 1 - int(case.where)
    if case.cause == "sleep":
        begins = rf"\[rank {other}\] CommError: rank {rank} did not join rank {other} in \w+ over "
        return rf"{begins}.* within {SHORT_TIMEOUT} s"
    said = SAID[case.cause]
    if case.layout == SERVED:
        # A stopped worker is ended when the other has long done its steps.
        return rf"worker {rank} {said}(; the others go on)?"
    if goes_on(case):
        return rf"rank {rank} {said}: the others went on without replica {rank}"
    if case.layout == REPLICAS:  # the others compute; nobody waits
        return rf"(CommError: )?rank {rank} {said}({WAITED}|; rank \d was at .*)?"
    mark = "" if "failed" in said else "CommError: "
    return rf"{mark}rank {rank} {said}{WAITED}"


def test_the_part_has_every_cause_and_layout() -> None:
    assert {case.cause for case in PART} == {case.cause for case in EVERY}
    assert {case.layout for case in PART} == set(LAYOUTS)
    assert set(PART) < set(EVERY)


def waits(case: Case) -> bool:
    """Whether it takes a timeout until the run ends."""
    return case.cause in ("SIGSTOP", "sleep")


def begun(case: Case, directory: Path) -> Started:
    """A run in which it happens."""
    # Where the others go on they come to an end; a signal to the launcher must find them alive.
    steps = "8" if goes_on(case) and case.where != "launcher" else "0"
    options = ["--layout", case.layout]
    words = [str(SCRIPT), case.cause, case.where, str(directory), steps]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
    env["TUTTI_TIMEOUT"] = SHORT_TIMEOUT if waits(case) else "100"
    env["TUTTI_LEASE"] = (
        "3" if waits(case) else "30"
    )  # replicas must give a stopped one up before the time-out
    words = ["-m", "tutti", "run", *options, *words]
    fresh = FRESH_ROLES if case == FRESH else ()
    return started(words, env=env, cwd=Path.cwd(), fresh=fresh)


@pytest.fixture(scope="module", autouse=True)
def early(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, tuple[Path, Started]]]:
    """The runs that mostly wait, which begin before the others."""
    processes = {}
    for case in () if ALL else filter(waits, PART):
        directory = tmp_path_factory.mktemp("early")
        processes[case] = directory, begun(case, directory)
    yield processes
    for _, process in processes.values():
        process.kill()


@pytest.fixture(scope="module", autouse=True)
def suspensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ended]]]:
    """Runs whose ranks are suspended: they sleep while others are played."""
    with ThreadPoolExecutor() as pool:
        yield {
            name: pool.submit(suspended, tmp_path_factory.mktemp(name), ranks)
            for name, ranks in (("all", [0, 1]), ("one", [1]))
        }


@pytest.mark.parametrize("case", EVERY if ALL else PART, ids=str)
def test_the_first_line_is_the_first_cause(
    case: Case, tmp_path: Path, early: dict[Case, tuple[Path, Started]]
) -> None:
    directory, process = early[case] if case in early else (tmp_path, begun(case, tmp_path))
    try:
        if case.where == "launcher":
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("rank 0 at step"), process.communicate(timeout=5)
            process.send_signal(signal.Signals[case.cause])
        _, err = process.communicate(timeout=RUN_SECONDS)
    finally:
        process.kill()
    if (case.cause, case.where) == ("SIGKILL", "launcher"):
        assert err == ""
    else:
        first = next((line for line in err.splitlines() if not NOTE.match(line)), "")
        assert re.fullmatch(first_line(case), first), err
    failed = case.layout == SERVED and "failed" in SAID.get(
        case.cause, ""
    )  # a script, not a machine
    good = goes_on(case) and case.where != "launcher" and not failed
    assert (process.returncode == 0) == good, (process.returncode, err)
    if case.where != "launcher" and "failed" in SAID[case.cause]:
        assert err.count("Traceback (most recent call last)") == 1, err
        assert "# here it goes wrong" in err and "causes.py" in err, err
    if case.cause == "segfault":
        assert "causes.py" in err, err  # where Python was
    assert_nothing_left(directory)


def assert_nothing_left(directory: Path) -> None:
    """No rank, and no directory of the run."""
    until = time.monotonic() + LEFT_SECONDS
    while True:
        pids = [int(path.read_text()) for path in directory.glob("rank*.pid")]
        left = [pid for pid in pids if lives(pid)], list(directory.glob("tutti-*"))
        if not any(left):
            return
        assert time.monotonic() < until, left
        time.sleep(0.1)


@pytest.mark.skipif(ALL, reason="every case is played")
def test_cases_that_the_suite_leaves_out() -> None:
    left = len(EVERY) - len(PART)
    pytest.skip(f"ALL_CAUSES=1 plays {left} cases more")


def test_all_ranks_suspended_for_twice_the_timeout_go_on(
    suspensions: dict[str, Future[Ended]],
) -> None:
    code, out, err = suspensions["all"].result()
    assert code == 0, err
    assert "played to the end" in out


def test_one_that_is_suspended_for_longer_is_named(
    suspensions: dict[str, Future[Ended]],
) -> None:
    code, _, err = suspensions["one"].result()
    assert code
    assert "rank 1 was stopped (SIGSTOP) and did not go on" in err
