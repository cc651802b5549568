"""The small files in which each rank of `tutti run` records its end, for one report."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank.

    `text` is the traceback, or the message alone of a `TuttiError`; `said` is its first line with the
    name of its type. `seconds` is when the script raised it (monotonic).
    """

    rank: int
    kind: str
    text: str
    seconds: float
    is_tutti: bool = False
    is_comm: bool = False
    line: str = ""
    collective: str = ""
    said: str = ""


@dataclass(frozen=True)
class StoppedAt:
    """A rank's position at its SIGTERM: its collective, if any, and the user's line.

    `seconds` is when the signal came (monotonic), None if unknown.
    """

    rank: int
    line: str
    collective: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Exit:
    """The exit code of a rank's script, and the time (monotonic seconds, None if unknown)."""

    rank: int
    code: int
    seconds: float | None = None


@dataclass(frozen=True)
class SavedLast:
    """A signal has ended the run, and the rank has saved this step before its end."""

    rank: int
    step: int


@dataclass(frozen=True)
class ReplicaJoined:
    """A rank's replica has met the others: from now on they can continue without it."""

    rank: int
    replica: int


@dataclass(frozen=True)
class Lost:
    """A rank of a lost replica, and its end; the others have continued."""

    rank: int
    replica: int
    code: int


@dataclass(frozen=True)
class GivenUp:
    """A rank of a replica that the others have given up: if it resumes, its results do not count."""

    rank: int


@dataclass(frozen=True)
class Waited:
    """A rank's report of an unusually long wait, its `number`-th, and the ranks that it waits for."""

    rank: int
    number: int
    text: str
    late: list[int]


@dataclass(frozen=True)
class Noted:
    """All that a process has to say to the user up to now: whole lines, each to be printed once."""

    rank: int
    lines: list[str]


Record = Failure | StoppedAt | Exit | SavedLast | ReplicaJoined | Lost | GivenUp | Waited | Noted
T = TypeVar("T", Failure, StoppedAt, Exit, SavedLast, ReplicaJoined, Lost, GivenUp, Waited, Noted)
# The word of each kind in the name of its file.
_KINDS: dict[type, str] = {
    Failure: "failure",
    StoppedAt: "place",
    Exit: "exit",
    SavedLast: "saved",
    ReplicaJoined: "joined",
    Lost: "lost",
    GivenUp: "givenup",
    Waited: "waited",
    Noted: "noted",
}


def write_record(run_dir: Path, record: Record) -> None:
    """Write `record` whole or not at all."""
    path = _path(run_dir, type(record), record.rank)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(record)))
    partial.replace(path)


def read_record(run_dir: Path, kind: type[T], rank: int) -> T | None:
    """The record of that kind that `rank` left, or None."""
    path = _path(run_dir, kind, rank)
    return kind(**json.loads(path.read_text())) if path.exists() else None


def note_pid(run_dir: Path, rank: int) -> None:
    """Tell the launcher the process, its own child, that is `rank` or its stand-in."""
    _write_pid(run_dir / f"rank{rank}.pid")


def note_script(run_dir: Path, rank: int) -> None:
    """Tell the launcher the process that runs the script of `rank`."""
    _write_pid(run_dir / f"rank{rank}.script")


def read_pid(run_dir: Path, rank: int) -> int | None:
    """The process of `note_pid`."""
    return _read_pid(run_dir / f"rank{rank}.pid")


def read_script(run_dir: Path, rank: int) -> int | None:
    """The process of `note_script`."""
    return _read_pid(run_dir / f"rank{rank}.script")


def _write_pid(path: Path) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(str(os.getpid()))
    partial.replace(path)


def _read_pid(path: Path) -> int | None:
    return int(path.read_text()) if path.exists() else None


def crash_file(run_dir: Path, rank: int) -> Path:
    """The file for Python's stack at a crash (SIGSEGV and the like)."""
    return run_dir / f"rank{rank}.crash"


def _path(run_dir: Path, kind: type[Record], rank: int) -> Path:
    return run_dir / f"rank{rank}.{_KINDS[kind]}.json"
