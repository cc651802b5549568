"""The section of timelines: a measured step on each rank, and the simulated schedule of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tutti.quantities import format_seconds
from tutti.report.page.blocks import Block, PictureBlock, Section, table
from tutti.report.page.run_records import Event
from tutti.report.page.span_rows import TimedSpan, draw_rows
from tutti.report.page.traced_calls import MEANINGS, TracedCall, rows_of

_PARTS = {"F": "s1", "B": "s3", "I": "s3", "W": "s2", "G": "s5", "A": "s6"}
_MEANINGS = {
    "F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients",
    "G": "gather", "A": "reduce",
}  # fmt: skip


def timeline(facts: Event, calls: Sequence[TracedCall]) -> Section | None:
    """One measured call of each rank, and the simulated schedule of a pipeline."""
    blocks: list[Block] = []
    if calls:
        seconds = max(c.end for c in calls) - min(c.begin for c in calls)
        span = f"{format_seconds(seconds)} from the first begin to the last end"
        told = f"The last traced call of {len(calls)} ranks, {span}."
        rows = rows_of(calls)
        blocks.append(
            PictureBlock(
                draw_rows(rows, "A measured step on each rank", told, MEANINGS, format_seconds),
                told,
            )
        )
        blocks.append(_call_table(calls))
    pipeline = facts.get("pipeline") or {}
    if pipeline.get("rows"):
        blocks.append(_schedule(pipeline))
    if len(pipeline.get("stages", ())) > 1:
        rows = [
            (
                s["number"],
                s["pipe"],
                format_seconds(s["seconds"]),
                s["line"],
                ", ".join(s["modules"]),
            )
            for s in pipeline["stages"]
        ]
        head = ("stage", "pipe", "a micro-batch", "begins at", "modules")
        blocks.append(table("Stages, with times for comparison", head, rows, (2,)))
    return Section("timeline", "Timeline", tuple(blocks)) if blocks else None


def _call_table(calls: Sequence[TracedCall]) -> Block:
    rows = []
    for c in calls:
        whole, moving, working = c.end - c.begin, c.seconds_of(True), c.seconds_of(False)
        between = max(0.0, whole - moving - working)
        rows.append((c.name, *map(format_seconds, (whole, working, moving, between))))
    head = ("rank", "call", "ops", "collectives and waits", "between ops")
    return table("The measured step", head, rows, (1, 2, 3, 4))


def _schedule(pipeline: Mapping[str, Any]) -> Block:
    rows = [
        (
            f"pipe {i}",
            [
                TimedSpan(
                    start,
                    end,
                    _PARTS.get(kind, "s6"),
                    f"{word}: {format_seconds(end - start)}",
                    word,
                )
                for word, kind, start, end in row
            ],
        )
        for i, row in enumerate(pipeline["rows"])
    ]
    kinds = {kind for row in pipeline["rows"] for _, kind, *_ in row}
    meanings = [(_PARTS[k], _MEANINGS[k]) for k in _PARTS if k in kinds]
    told = (
        f"The schedule, simulated: {format_seconds(pipeline['seconds'])}, "
        f"{pipeline['idle_share']:.1%} of it idle. Its times serve comparison only."
    )
    drawn = draw_rows(
        rows, "The simulated schedule", told, [*meanings, ("idle", "idle")], format_seconds
    )
    return PictureBlock(drawn, told)
