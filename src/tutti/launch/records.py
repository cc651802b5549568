"""The small files in which each rank of `tutti run` notes how it ended, for one report."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank.

    `text` is the traceback, or the message alone where it is a `TuttiError`; `said` is its first line
    with the name of its type. `seconds` is when the script raised it (monotonic).
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
    """Where a rank stood when SIGTERM told it to stop: its collective, if any, and the user's line.

    `seconds` is when the signal came (monotonic), None if not known.
    """

    rank: int
    line: str
    collective: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Exit:
    """The code with which a rank's script ended, and when (monotonic seconds, None if not known)."""

    rank: int
    code: int
    seconds: float | None = None


@dataclass(frozen=True)
class ReplicaJoined:
    """A rank's replica has come together with the others: from now on they can go on without it."""

    rank: int
    replica: int


@dataclass(frozen=True)
class Lost:
    """A rank of a replica that the others have gone on without, and how it ended."""

    rank: int
    replica: int
    code: int


@dataclass(frozen=True)
class GivenUp:
    """A rank of a replica that the others have given up: if it goes on, nothing that it does counts."""

    rank: int


@dataclass(frozen=True)
class Waited:
    """What a rank says of an unusually long wait, its `number`-th, and for which ranks it waits."""

    rank: int
    number: int
    text: str
    late: list[int]


Record = Failure | StoppedAt | Exit | ReplicaJoined | Lost | GivenUp | Waited
T = TypeVar("T", Failure, StoppedAt, Exit, ReplicaJoined, Lost, GivenUp, Waited)
# The word of each kind in the name of its file.
_KINDS: dict[type, str] = {
    Failure: "failure",
    StoppedAt: "place",
    Exit: "exit",
    ReplicaJoined: "joined",
    Lost: "lost",
    GivenUp: "givenup",
    Waited: "waited",
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
    """Tell the launcher which process, a child of its own, is `rank` or stands in for it."""
    _write_pid(run_dir / f"rank{rank}.pid")


def note_script(run_dir: Path, rank: int) -> None:
    """Tell the launcher which process runs the script of `rank`."""
    _write_pid(run_dir / f"rank{rank}.script")


def read_pid(run_dir: Path, rank: int) -> int | None:
    """What `note_pid` has noted."""
    return _read_pid(run_dir / f"rank{rank}.pid")


def read_script(run_dir: Path, rank: int) -> int | None:
    """What `note_script` has noted."""
    return _read_pid(run_dir / f"rank{rank}.script")


def _write_pid(path: Path) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(str(os.getpid()))
    partial.replace(path)


def _read_pid(path: Path) -> int | None:
    return int(path.read_text()) if path.exists() else None


def crash_file(run_dir: Path, rank: int) -> Path:
    """Where a crash (SIGSEGV and the like) leaves the lines that Python was at."""
    return run_dir / f"rank{rank}.crash"


def _path(run_dir: Path, kind: type[Record], rank: int) -> Path:
    return run_dir / f"rank{rank}.{_KINDS[kind]}.json"
