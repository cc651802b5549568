"""The sections about a program: its memory, its collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tutti.quantities import format_nbytes, format_seconds
from tutti.report.page.blocks import Block, PictureBlock, Section, Words, table
from tutti.report.page.memory_picture import KINDS, draw_course, draw_kinds
from tutti.report.page.run_records import Event, RunRecords
from tutti.report.page.traced_calls import TracedCall, collective_seconds_by_line
from tutti.report.page.value_bars import draw_bars

MOST_BARS, MOST_COLLECTIVES = 15, 300


def main_facts(run: RunRecords) -> Event:
    """The facts of the program that the report shows: the first of the first step that trains."""
    if run.leader is None:
        return {}
    last = run.leader.last
    training = [r["of"] for r in last.of("step") if r.get("optimizers")]
    found = [r for r in last.of("program") if r.get("facts")]
    chosen = [r for r in found if r.get("of") in training[:1]] or found
    return {**chosen[0]["facts"], "of": chosen[0].get("of")} if chosen else {}


def memory(run: RunRecords, facts: Event) -> Section | None:
    """The predicted memory over the program, by kind, and beside the measured one."""
    own = facts.get("memory")
    if not own or run.leader is None:
        return None
    own_step = [r for r in run.leader.last.of("measured") if r.get("of") == facts.get("of")]
    measured = [int(r["nbytes"]) for r in own_step if r.get("nbytes")]
    held = own["peak_nbytes"] - own["call_nbytes"]
    bounds = [("measured peak", held + measured[0])] if measured else []
    if own.get("budget_nbytes"):
        bounds.append(("remat budget", int(own["budget_nbytes"])))
    blocks: list[Block] = []
    if (drawn := draw_course(own, bounds, f"Predicted memory on {run.leader.name}")) is not None:
        words = f"Memory on {run.leader.name} over the positions of the program."
        blocks.append(PictureBlock(drawn, f"{words} The predicted peak bounds it."))
    blocks.append(
        PictureBlock(
            draw_kinds(own), f"{format_nbytes(own['peak_nbytes'])} at the predicted peak, by kind."
        )
    )
    blocks.append(_memory_table(run, facts, measured))
    rows = [
        (h["name"], h["kind"], h["shape"] or "", format_nbytes(h["nbytes"]), h["source"])
        for h in own.get("largest", ())
    ]
    if rows:
        head = ("value", "kind", "shape", "bytes", "made at")
        blocks.append(table("The largest values at the peak, beside the state", head, rows, (3,)))
    return Section("memory", "Memory", tuple(blocks))


def _memory_table(run: RunRecords, facts: Event, measured: Sequence[int]) -> Block:
    """The predicted memory of each pipeline rank, or of the one program."""
    own = facts["memory"]
    rows = []
    for process in run.processes:
        found = [
            r["facts"]["memory"]
            for r in process.last.of("program")
            if r.get("of") == facts.get("of") and (r.get("facts") or {}).get("memory")
        ]
        if found:
            m = found[0]
            kinds = [format_nbytes(m[f"{name}_nbytes"]) for name, _ in KINDS]
            call = format_nbytes(measured[0]) if measured and m == own else ""
            rows.append(
                [
                    process.name,
                    format_nbytes(m["peak_nbytes"]),
                    *kinds,
                    format_nbytes(m["call_nbytes"]),
                    call,
                    f"{m['op']}, {m['source']}",
                ]
            )
    caption = "Predicted memory"
    if measured and measured[0] > own["call_nbytes"] and len(run.processes) > 1:
        caption += "; the measured bytes count buffers that a thread of the engine has released"
    kinds = ("state", "gradients", "activations", "other")
    head = ("rank", "peak", *kinds, "of a call", "of a call, measured", "peak at")
    return table(caption, head, rows, range(1, 8))


def collectives(facts: Event, calls: Sequence[TracedCall]) -> Section | None:
    """The collectives by source line, with bytes, counts and causes; measured times from traces."""
    if "collectives" not in facts:
        return None
    found = sorted(facts["collectives"], key=lambda r: -r["nbytes"])
    messages = _message_tables(facts)
    if not found:
        words = Words("The program has no collectives.")
        return Section("collectives", "Collectives", (words, *messages))
    lines: dict[str, int] = {}
    for r in found:
        lines[r["line"]] = lines.get(r["line"], 0) + r["nbytes"]
    top = sorted(lines.items(), key=lambda entry: -entry[1])[:MOST_BARS]
    total = format_nbytes(sum(lines.values()))
    count, sent = sum(r["count"] for r in found), facts.get("num_sent")
    joined = f", joined into {sent} exchanges" if sent and sent < count else ""
    where = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
    told = f"{count} collectives{joined}, {total} a step, from {where}."
    bars = draw_bars(
        [(n or "no line", float(b), "s1") for n, b in top],
        "Bytes sent by line",
        told,
        format_nbytes,
    )
    blocks: list[Block] = [
        PictureBlock(bars, f"Bytes that a rank sends in a step, by source line: {told}")
    ]
    blocks.append(_line_table(found, collective_seconds_by_line(calls) if calls else {}))
    blocks.append(_collective_table(found))
    return Section("collectives", "Collectives", (*blocks, *messages))


def _message_tables(facts: Event) -> list[Block]:
    """The messages between pipeline ranks, if there are any."""
    messages = (facts.get("pipeline") or {}).get("messages")
    if not messages:
        return []
    rows = [
        (
            f"{m['from']} to {m['to']}",
            format_nbytes(m["nbytes"]),
            m["times"],
            format_nbytes(m["times"] * m["nbytes"]),
            m["line"],
        )
        for m in messages
    ]
    total = format_nbytes(sum(m["times"] * m["nbytes"] for m in messages))
    head = ("pipe", "bytes each time", "times a step", "bytes a step", "made at")
    return [table(f"Messages between pipeline ranks, {total} a step", head, rows, (1, 2, 3))]


def _line_table(found: Sequence[Mapping[str, Any]], seconds: Mapping[str, float]) -> Block:
    """The sums of each line; with traces the measured time there, waits for other ranks included."""
    rows: list[list[object]] = []
    for name in dict.fromkeys(r["line"] for r in found):
        own = [r for r in found if r["line"] == name]
        kinds = ", ".join(dict.fromkeys(str(r["kind"]) for r in own))
        count, nbytes = sum(r["count"] for r in own), sum(r["nbytes"] for r in own)
        rows.append([name or "no line", kinds, count, format_nbytes(nbytes)])
        if seconds:
            rows[-1].append(format_seconds(seconds[name]) if name in seconds else "")
    others = [(name, s) for name, s in seconds.items() if name not in {r["line"] for r in found}]
    for name, spent in others:
        rows.append([name or "no line", "moved by a pass", "", "", format_seconds(spent)])
    head = ["line", "collectives", "count", "bytes sent", *(["measured"] if seconds else [])]
    words = "; measured is the time in them, waits for other ranks included" if seconds else ""
    if any(not row[-1] for row in rows):
        words += "; a line without a time shares a collective with another"
    caption, numbers = f"Collectives by line{words}", range(2, len(head))
    return table(caption, head, rows, numbers, folded=len(rows) > MOST_BARS)


def _collective_table(found: Sequence[Mapping[str, Any]]) -> Block:
    names = ("line", "region", "kind", "dtype", "over", "cause")
    head = ["line", "region", "collective", "dtype", "over", "cause", "count", "bytes sent"]
    rows: list[list[object]] = [
        [*(r[n] for n in names), r["count"], format_nbytes(r["nbytes"])] for r in found
    ]
    if any(r["pipe"] for r in found):
        head.insert(0, "pipe")
        rows = [[r["pipe"], *row] for r, row in zip(found, rows, strict=True)]
    numbers = range(head.index("count"), len(head))
    caption = "Collectives of a step, with their causes"
    return table(caption, head, rows, numbers, folded=len(rows) > 8, most=MOST_COLLECTIVES)
