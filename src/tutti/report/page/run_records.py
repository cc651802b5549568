"""Reads the folder of a report. What a kill has cut or others have written there is left out, and counted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import TuttiError
from tutti.recording.report_folder import LAUNCHER, PLAN, RECORDS_SUFFIX, VERDICT

Event = Mapping[str, Any]
# A process of a run may begin this long before the launcher's line is written: clocks are rounded.
_SLACK_SECONDS = 1.0
_NAME = re.compile(r"(rank|worker|server)-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Start:
    """One start of a process: its first line, and its records in order."""

    begin: Event
    records: list[Event]

    def of(self, kind: str) -> list[Event]:
        """The records of one kind."""
        return [r for r in self.records if r.get("kind") == kind]


@dataclass(frozen=True)
class ProcessRecords:
    """The file of one process: its last start, and earlier ones."""

    name: str
    last: Start
    earlier: tuple[Start, ...] = ()


@dataclass(frozen=True)
class RunRecords:
    """All that a folder holds.

    Args:
        folder: its path.
        launcher: the records of `tutti run`, if it has started the run.
        processes: of the newest run, in order; the first one leads.
        verdict, plan: the content of their files; None without one.
        problems: sentences about what could not be read.
    """

    folder: Path
    launcher: ProcessRecords | None
    processes: tuple[ProcessRecords, ...]
    verdict: Event | None
    plan: Event | None
    problems: tuple[str, ...] = field(default=())

    @property
    def leader(self) -> ProcessRecords | None:
        """Rank 0, or the first rank of the first worker."""
        return self.processes[0] if self.processes else None


def read_run(folder: Path) -> RunRecords:
    """The records in `folder`.

    Raises:
        TuttiError: it is no folder, or has neither records nor a verdict nor a plan.
    """
    if not folder.is_dir():
        raise TuttiError(f"{folder} is no folder", fix="the folder of tutti run --report")
    problems: list[str] = []
    every = [_process(file, problems) for file in sorted(folder.glob(f"*{RECORDS_SUFFIX}"))]
    known = {one.name: one for one in every if one is not None}
    launcher = known.pop(LAUNCHER, None)
    processes = _of_newest_run(list(known.values()), launcher)
    verdict, plan = (_object(folder / name, problems) for name in (VERDICT, PLAN))
    if launcher is None and not processes and verdict is None and plan is None:
        raise TuttiError(
            f"{folder} has no records of a run",
            why="; ".join(problems) or f"no file *{RECORDS_SUFFIX} in it begins as one of a run",
            fix=f"tutti run --report {folder} SCRIPT writes them while it trains",
        )
    return RunRecords(folder, launcher, tuple(processes), verdict, plan, tuple(problems))


def _of_newest_run(
    known: list[ProcessRecords], launcher: ProcessRecords | None
) -> list[ProcessRecords]:
    """The processes whose last start is of the newest run: a run before may have had more ranks."""
    known.sort(key=lambda one: _order(one.name))
    if not known:
        return []
    if launcher is not None:
        since = _time(launcher.last.begin) - _SLACK_SECONDS
        return [one for one in known if _time(one.last.begin) >= since]
    newest = max(known, key=lambda one: _time(one.last.begin)).last.begin
    size = int(newest.get("world_size") or 1)
    return [one for one in known if one.name.startswith("worker") or _order(one.name)[1] < size]


def _order(name: str) -> tuple[str, int, int]:
    found = _NAME.fullmatch(name.replace(" ", "-"))
    return (found[1], int(found[2]), int(found[3] or 0)) if found else (name, 0, 0)


def _time(begin: Event) -> float:
    value = begin.get("time")
    return float(value) if isinstance(value, int | float) else 0.0


def _process(file: Path, problems: list[str]) -> ProcessRecords | None:
    starts: list[Start] = []
    num_bad = 0
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        problems.append(f"{file.name} cannot be read: {error.strerror}")
        return None
    for line in lines:
        record = _record(line)
        if record is None:
            num_bad += bool(line.strip())
        elif record.get("kind") == "begin":
            starts.append(Start(record, []))
        elif starts:
            starts[-1].records.append(record)
        else:
            num_bad += 1
    if num_bad:
        problems.append(f"{file.name}: {num_bad} lines are cut or are no records, and left out")
    if not starts:
        return None
    name = starts[-1].begin.get("name")
    return ProcessRecords(str(name or file.stem), starts[-1], tuple(starts[:-1]))


def _record(line: bytes) -> Event | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("kind"), str) else None


def _object(file: Path, problems: list[str]) -> Event | None:
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_bytes())
        if isinstance(found, dict):
            return found
        problems.append(f"{file.name} holds no JSON object, and is left out")
    except (OSError, ValueError) as error:
        problems.append(f"{file.name} cannot be read, and is left out: {error}")
    return None
