"""One call of each rank, from the traces of `tutti run --profile`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.execution.profiling import trace_files
from tutti.report.page.span_rows import TimedSpan, binned

MOST_RANKS = 16
_OUTER = ("step", "loop", "micro-batch")
_CLASSES = {"forward": "s1", "backward": "s3", "update": "s2", "collective": "s4"}
MEANINGS = (
    *(("s1", "forward"), ("s3", "backward"), ("s2", "update"), ("s4", "collective")),
    *(("s6", "other"), ("idle", "between ops")),
)
# The most spans of all rows together, and of one.
_MOST_SPANS, _MOST_OF_A_ROW = 4000, 900


@dataclass(frozen=True)
class TracedCall:
    """The last traced call of one process; times in seconds.

    Args:
        name: of the process.
        begin, end: on the clock of the traces.
        ops: the innermost events: (name, category, begin, end, line).
    """

    name: str
    begin: float
    end: float
    ops: tuple[tuple[str, str, float, float, str], ...]

    def seconds_of(self, collective: bool) -> float:
        """The time of its collectives, or of its other ops."""
        return sum(e - b for _, kind, b, e, _ in self.ops if (kind == "collective") == collective)


def read_traces(folder: Path, since: float, problems: list[str]) -> list[TracedCall]:
    """A call of each process that has a trace there, written after `since` (seconds of the epoch): others are
    of an earlier run."""
    found = []
    for file in trace_files(folder):
        try:
            if file.stat().st_mtime < since:
                problems.append(f"{file.name} is a trace of an earlier run, and is left out")
                continue
            events = json.loads(file.read_bytes())["traceEvents"]
            call = _last_call(file.stem.replace("-", " ", 1), events)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{file.name} is no trace, and is left out: {error!r}")
            continue
        if call is not None:
            found.append(call)
    return found


def _last_call(name: str, events: Sequence[Mapping[str, Any]]) -> TracedCall | None:
    timed = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    calls = [e for e in timed if e["cat"] == "step"]
    if not calls:
        return None
    last = max(calls, key=lambda e: e["ts"])
    begin, end = last["ts"], last["ts"] + last["dur"]
    inside = [e for e in timed if e["cat"] not in _OUTER and begin <= e["ts"] < end]
    ops = [
        (str(e["name"]), str(e["cat"]), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, _line(e))
        for e in inside
    ]
    return TracedCall(name, begin / 1e6, end / 1e6, tuple(ops))


def _line(event: Mapping[str, Any]) -> str:
    return Path(str(event.get("args", {}).get("line", ""))).name


def rows_of(calls: Sequence[TracedCall]) -> list[tuple[str, list[TimedSpan]]]:
    """The rows of the first ranks, on one clock that begins with the first of these calls."""
    shown = calls[:MOST_RANKS]
    zero = min(c.begin for c in shown)
    seconds, most = max(c.end for c in shown) - zero, min(_MOST_OF_A_ROW, _MOST_SPANS // len(shown))
    rows = []
    for call in shown:
        spans = [
            TimedSpan(b - zero, e - zero, _CLASSES.get(kind, "s6"), f"{name}, {line}")
            for name, kind, b, e, line in call.ops
        ]
        rows.append((call.name, binned(spans, seconds, most)))
    return rows


def collective_seconds_by_line(calls: Sequence[TracedCall]) -> dict[str, float]:
    """The mean seconds that a rank spends in the collectives of each line, waits included."""
    found: dict[str, float] = defaultdict(float)
    for call in calls:
        for _, kind, begin, end, line in call.ops:
            if kind == "collective":
                found[line] += (end - begin) / len(calls)
    return found
