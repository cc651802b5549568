"""The small files in which each rank of `tutti run` notes how it ended, for one report."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

# What the launcher tells the ranks.
RUN_DIR = "TUTTI_RUN_DIR"
LAYOUT = "TUTTI_LAYOUT"


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank.

    `text` is what to show: a traceback, or the message alone where it is a `TuttiError`.
    """

    rank: int
    kind: str
    text: str
    seconds: float
    is_tutti: bool = False
    is_comm: bool = False
    line: str = ""
    collective: str = ""


@dataclass(frozen=True)
class Place:
    """Where a rank stood when it was told to stop: its collective, if any, and the user's line."""

    rank: int
    line: str
    collective: str = ""


@dataclass(frozen=True)
class Exit:
    """The code with which a rank's script ended."""

    rank: int
    code: int


@dataclass(frozen=True)
class Joined:
    """A rank's replica has come together with the others: from now on they can go on without it."""

    rank: int
    replica: int


@dataclass(frozen=True)
class Lost:
    """A rank of a replica that the others have gone on without, and how it ended."""

    rank: int
    replica: int
    code: int


Record = Failure | Place | Exit | Joined | Lost
T = TypeVar("T", Failure, Place, Exit, Joined, Lost)


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


def _path(run_dir: Path, kind: type[Record], rank: int) -> Path:
    return run_dir / f"rank{rank}.{kind.__name__.lower()}.json"
