"""What the traces of a profiled run say: the ops that took most of a call, in the user's lines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tutti.errors import TuttiError
from tutti.execution.profiling import trace_files
from tutti.quantities import format_nbytes
from tutti.report.text_table import columns

MOST_ROWS = 12
# Categories of events that hold other events: a call, its loop, a micro-batch.
_OUTER = ("step", "loop", "micro-batch")
# Microseconds, of times that are written as large numbers.
_ROUNDING = 0.01


def trace_summary(folder: Path) -> str:
    """The calls of each program, and the ops of the longest program by the time that they take.

    Times are means over ranks and calls, in milliseconds. The last row is the time between the ops: the
    player's Python, and what it waits for.

    Raises:
        TuttiError: the folder has no trace, or a file there is none.
    """
    files = trace_files(folder)
    events = [event for file in files for event in _events(file)]
    calls = [e for e in events if e["cat"] == "step"]
    if not calls:
        raise TuttiError(
            f"no trace in {folder}",
            why="a profile leaves the first two calls of a program out, as they compile it",
            fix="a run of at least three steps",
        )
    programs: dict[int, list[Any]] = defaultdict(list)
    for call in calls:
        programs[call["args"]["program"]].append(call)
    number = max(programs, key=lambda k: sum(c["dur"] for c in programs[k]))
    chosen = programs[number]
    mean = sum(c["dur"] for c in chosen) / len(chosen)
    lines = [
        f"profile: {len(chosen) // len(files)} calls of {mean / 1e3:.3g} ms on each of {len(files)} "
        f"{'rank' if len(files) == 1 else 'ranks'}, in {folder} for https://ui.perfetto.dev"
    ]
    if len(programs) > 1:
        lines.append(f"of {len(programs)} programs, that of {chosen[0]['name'].partition(',')[0]}")
    rows = _rows(events, chosen, mean)
    return "\n".join([*lines, columns(("ms", "share", "count", "op", "line"), rows)])


def _events(file: Path) -> list[Any]:
    try:
        found = json.loads(file.read_text())["traceEvents"]
        return [e for e in found if e["ph"] == "X" and e["tid"] == 0]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TuttiError(
            f"{file} is no trace", why=repr(error), fix="a folder of its own"
        ) from error


def _rows(
    events: Iterable[Mapping[str, Any]], calls: list[Mapping[str, Any]], mean: float
) -> list[tuple[str, ...]]:
    inside = _inside(events, calls)
    times: dict[tuple[str, str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    nbytes: dict[tuple[str, str, str], int] = defaultdict(int)
    for e, seconds in inside:
        shown = e["args"]
        several = f" of {shown['tensors']} tensors" if shown.get("tensors", 1) > 1 else ""
        over = f" over {shown['axes']}" if "axes" in shown else ""
        name = f"{e['name']}{several}{over}"
        key = (name, str(shown.get("line", "")), str(shown.get("region", "")))
        times[key] += seconds
        counts[key] += 1
        nbytes[key] += shown.get("nbytes", 0)
    each = len(calls)
    rows: list[tuple[str, ...]] = []
    by_time = sorted(times, key=lambda k: -times[k])
    for key in by_time[:MOST_ROWS]:
        name, line, region = key
        moved = f", {format_nbytes(nbytes[key] / each)}" if nbytes[key] else ""
        where = f"{Path(line).name} {region}".strip()
        rows.append(
            (*_share(times[key] / each, mean), f"{counts[key] / each:g}", name + moved, where)
        )
    if rest := by_time[MOST_ROWS:]:
        spent = sum(times[k] for k in rest) / each
        rows.append(
            (*_share(spent, mean), f"{sum(counts[k] for k in rest) / each:g}", "others", "")
        )
    between = mean - sum(times.values()) / each
    rows.append((*_share(between, mean), "", "between ops", ""))
    return rows


def _share(microseconds: float, whole: float) -> tuple[str, str]:
    return f"{microseconds / 1e3:.3g}", f"{microseconds / whole:.0%}".replace("%", " %")


def _inside(
    events: Iterable[Mapping[str, Any]], calls: list[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], float]]:
    """The ops of the calls and the messages between pipeline ranks, each with its own microseconds: those of
    an event within it, such as a message within the op that posts it, are left out."""
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for call in calls:
        spans[call["pid"]].append((call["ts"], call["ts"] + call["dur"]))
    found = []
    for e in events:
        if e["cat"] not in _OUTER and any(begin <= e["ts"] < end for begin, end in spans[e["pid"]]):
            found.append(e)
    return _own_times(found)


def _own_times(events: list[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    own = [e["dur"] for e in events]
    order = sorted(range(len(events)), key=lambda k: (events[k]["pid"], events[k]["ts"], -own[k]))
    around: list[int] = []
    for k in order:
        one = events[k]
        while around and not _holds(events[around[-1]], one):
            around.pop()
        if around:
            own[around[-1]] -= one["dur"]
        around.append(k)
    return [(e, max(0.0, seconds)) for e, seconds in zip(events, own, strict=True)]


def _holds(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    end = outer["ts"] + outer["dur"]
    return outer["pid"] == inner["pid"] and inner["ts"] + inner["dur"] <= end + _ROUNDING
