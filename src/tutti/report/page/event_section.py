"""The section of events: new programs, NaN, saves, restarts, the end."""

from __future__ import annotations

from tutti.quantities import format_seconds
from tutti.report.page.blocks import Section, Words, table
from tutti.report.page.run_records import Event, RunRecords
from tutti.report.page.run_sections import date_text, or_words

MOST_EVENTS = 200


def events(run: RunRecords) -> Section:
    """What happened, in order."""
    every = sorted(_all_events(run), key=lambda entry: entry[0])
    rows = [(date_text(at), name, kind, words) for at, name, kind, words in every]
    if not rows:
        return Section("events", "Events", (Words("No events are recorded."),))
    left_out = len(rows) - MOST_EVENTS
    if left_out > 0:
        half = MOST_EVENTS // 2
        gap = ("", "", "", f"{left_out} events are left out here")
        rows = [*rows[:half], gap, *rows[-half:]]
    head = ("time", "process", "event", "what")
    return Section("events", "Events", (table("Events in order", head, rows),))


def _all_events(run: RunRecords) -> list[tuple[float, str, str, str]]:
    found = []
    for process in (*([run.launcher] if run.launcher else []), *run.processes):
        for r in process.last.records:
            words = _words(r)
            if words:
                at = r.get("time")
                when = float(at) if isinstance(at, int | float) else 0.0
                found.append((when, process.name, str(r["kind"]), words))
    return found


def _words(r: Event) -> str:
    """An event in words; "" for records that are none."""
    match r["kind"]:
        case "program":
            took = or_words(format_seconds, r.get("seconds"), "?")
            return f"program {r.get('number')} at step {r.get('step')}, {took}: {r.get('why') or 'the first'}"
        case "nan":
            return f"step {r.get('step')} returned {r.get('value')} as {r.get('name')}"
        case "save":
            took = (
                f" in {format_seconds(r['seconds'])}" if isinstance(r.get("seconds"), float) else ""
            )
            return f"step {r.get('step')} into {r.get('folder')}{took}"
        case "restore":
            return f"step {r.get('step')} from {r.get('folder')}"
        case "save failed":
            return f"step {r.get('step')}: {r.get('text')}"
        case "said" | "problem":
            return str(r.get("text", ""))
        case "ended":
            return f"exit code {r.get('code')}"
        case "end":
            return "the process ended by itself"
    return ""
