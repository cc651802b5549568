"""The sections about a run as a whole: its state, loss, time."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from tutti.quantities import format_nbytes, format_seconds
from tutti.report.page.blocks import (
    Block,
    PictureBlock,
    Section,
    TableBlock,
    Verbatim,
    Words,
    table,
)
from tutti.report.page.curves import Curve, draw_curves
from tutti.report.page.run_records import Event, ProcessRecords, RunRecords
from tutti.report.page.step_data import StepSeries, series_of
from tutti.report.page.value_bars import draw_bars

_SIGNALS = {130: "Ended by Ctrl-C", 143: "Ended by SIGTERM"}
MOST_MARKS, NUM_SAMPLES, MOST_RANKS = 12, 20, 64


def state_of(run: RunRecords) -> tuple[str, str]:
    """How the run ended: a word for the style (`good`, `bad`, `open`), and a sentence."""
    if run.launcher is not None:
        ended = run.launcher.last.of("ended")
        if not ended:
            return "open", "No end recorded: it still runs, or its launcher was killed"
        code = ended[-1].get("code")
        if code == 0:
            return "good", "Ended well"
        if code in _SIGNALS:
            return "open", f"{_SIGNALS[code]}, exit code {code}"
        return "bad", f"Failed, exit code {code}" if code is not None else "Failed"
    if run.leader is None:
        return "open", "Not run yet"
    if run.leader.last.of("end"):
        return "good", "Ended by itself"
    return "open", "No end recorded: it still runs, or was killed"


def summary(run: RunRecords, steps: Sequence[StepSeries]) -> Section:
    """The end of the run, and its data."""
    blocks: list[Block] = []
    if run.launcher is not None:
        said = [str(r.get("text", "")) for r in run.launcher.last.of("said")]
        if said:
            blocks.append(Verbatim("\n".join(said)[:20_000], "What the launcher said"))
    blocks += [Words(text, alert=True) for text in run.problems]
    if run.leader is not None and (nans := run.leader.last.of("nan")):
        first = nans[0]
        words = f"Step {first.get('step')} returned {first.get('value')} as {first.get('name')}."
        blocks.append(Words(words, alert=True))
    blocks.append(table("The run", ("what", "value"), _facts(run, steps)))
    if run.leader is not None and run.leader.earlier:
        blocks.append(_earlier(run.leader))
    return Section("run", "The run", tuple(blocks))


def _facts(run: RunRecords, steps: Sequence[StepSeries]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if run.launcher is not None and (told := run.launcher.last.of("run")):
        rows.append(("command", " ".join(map(str, told[-1].get("command", ())))))
    if run.leader is not None:
        begin = run.leader.last.begin
        versions = begin.get("versions") or {}
        rows += [
            ("started", date_text(begin.get("time"))),
            ("processes with records", str(len(run.processes))),
            ("host", f"{begin.get('host', '')}, {begin.get('processors', '?')} processors"),
            ("platform", str(begin.get("platform", ""))),
            ("versions", ", ".join(f"{name} {v}" for name, v in versions.items())),
            ("threads of each process", str(begin.get("threads", ""))),
        ]
    for one in steps:
        optimizers = ", ".join(map(str, one.told.get("optimizers", ()))) or "no optimizer"
        number = f"{int(one.told.get('num_parameters') or 0):,} parameters"
        at = f", at {one.told['line']}" if one.told.get("line") else ""
        words = f"{one.title}, {number}, {optimizers}{at}"
        rows.append(("training step" if one.trains else "evaluation", words))
        rows.append(("layout", str(one.told.get("layout") or "one device")))
    return rows


def _earlier(leader: ProcessRecords) -> TableBlock:
    rows = [
        (
            date_text(one.begin.get("time")),
            str(next((r.get("layout") for r in one.of("step")), "")) or "one device",
            _steps_of(one.of("steps")),
            "ended by itself" if one.of("end") else "no end recorded",
        )
        for one in leader.earlier
    ]
    return table("Earlier starts in this folder", ("started", "layout", "steps", "end"), rows)


def _steps_of(records: Sequence[Event]) -> str:
    points = [p for r in records for p in r.get("points", ())]
    return f"{points[0][0]} to {points[-1][0]}" if points else "none"


def date_text(seconds: Any) -> str:
    """A time since the epoch, here."""
    if not isinstance(seconds, int | float):
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def loss(run: RunRecords, steps: Sequence[StepSeries]) -> Section | None:
    """The returned scalars of each step, over the steps; with replicas a curve for each."""
    blocks: list[Block] = []
    others = [series_of(one) for one in _leads_of_replicas(run)[1:6]]
    for one in steps:
        for name in one.names:
            words = f"{name}, replica 0" if any(others) else name
            curves = [Curve(words, one.values(name))]
            own = [s for some in others for s in some if s.told.get("of") == one.told.get("of")]
            curves += [
                Curve(f"{name}, replica {i + 1}", s.values(name))
                for i, s in enumerate(own)
                if name in s.names
            ]
            drawn = draw_curves(curves, f"{name} of {one.title}", marks=_marks(run))
            if drawn is None:
                blocks.append(
                    Words(f"{name} of {one.title} was no number at any step.", alert=True)
                )
            else:
                band = " The band spans the lowest to the highest value of neighboring steps."
                many = len(one.points) > 600
                blocks.append(PictureBlock(drawn, f"{name} of {one.title}.{band if many else ''}"))
        if one.points:
            blocks.append(_samples(one))
    if not blocks:
        if not steps:
            return None
        blocks.append(Words("The step returns no number, so there is no curve."))
    return Section("loss", "Loss", tuple(blocks))


def _leads_of_replicas(run: RunRecords) -> list[ProcessRecords]:
    """The first rank of each replica or worker."""
    if run.leader is None:
        return []
    workers = [p for p in run.processes if p.name.startswith("worker") and "." not in p.name]
    if workers:
        return workers
    told = run.leader.last.of("step")
    layout = str(told[0].get("layout", "")) if told else ""
    found = re.search(r"\breplica=(\d+)", layout)
    count = int(found[1]) if found else 1
    size = max(1, len(run.processes) // max(1, count))
    return list(run.processes[::size][:count])


def _marks(run: RunRecords) -> list[tuple[float, str]]:
    if run.leader is None:
        return []
    found = [
        (float(r["step"]), {"save": "saved", "restore": "restored"}[r["kind"]])
        for kind in ("save", "restore")
        for r in run.leader.last.of(kind)
        if isinstance(r.get("step"), int | float)
    ]
    return (
        found if len(found) <= MOST_MARKS else [m for m in found if m[1] == "restored"][:MOST_MARKS]
    )


def _samples(one: StepSeries) -> TableBlock:
    points = one.points
    at = {round(k * (len(points) - 1) / (NUM_SAMPLES - 1)) for k in range(NUM_SAMPLES)}
    rows = [
        (
            f"{points[i][0]:g}",
            *(f"{v:.6g}" for v in points[i][3:]),
            format_seconds(points[i][2]) if math.isfinite(points[i][2]) else "not timed",
        )
        for i in sorted(at)
    ]
    caption = f"Steps of {one.title}" + ("" if len(points) <= NUM_SAMPLES else ", a sample")
    head = ("step", *one.names, "time of the step")
    return table(caption, head, rows, range(len(head)), folded=True)


def times(run: RunRecords, steps: Sequence[StepSeries]) -> Section | None:
    """The measured step beside the predicted one, its course, and the ranks beside each other."""
    blocks: list[Block] = []
    rows = [_measured(one, run) for one in steps]
    if any(row is not None for row in rows):
        head = ("step", "measured", "predicted", "peak memory, measured", "predicted", "held")
        blocks.append(table("Measured beside predicted", head, [r for r in rows if r], range(1, 6)))
    for one in steps:
        curve = [Curve("seconds", one.seconds)]
        title = f"Time of each step of {one.title}"
        drawn = draw_curves(curve, title, show=format_seconds, cut=True, zero=True)
        if drawn is not None:
            blocks.append(
                PictureBlock(
                    drawn,
                    f"{title}, on {run.processes[0].name}, without those that made a program.",
                )
            )
    blocks += _ranks(run)
    return Section("time", "Time", tuple(blocks)) if blocks else None


def _measured(one: StepSeries, run: RunRecords) -> tuple[str, ...] | None:
    assert run.leader is not None
    found = [r for r in run.leader.last.of("measured") if r.get("of") == one.told.get("of")]
    told: Event = found[-1] if found else {}
    seconds, held = one.median_seconds, told.get("held_nbytes")
    if seconds is None:
        return None
    return (
        one.title,
        format_seconds(seconds),
        or_words(format_seconds, told.get("predicted_seconds"), "no plan chose the layout"),
        or_words(format_nbytes, _sum(held, told.get("nbytes")), "not measured"),
        or_words(format_nbytes, _sum(held, told.get("predicted_nbytes")), "not predicted"),
        or_words(format_nbytes, held, "not predicted"),
    )


def _sum(held: Any, added: Any) -> Any:
    """Bytes held between calls, and those that a call adds at its peak; None if one of them is not known."""
    return None if held is None or added is None else held + added


def or_words(show: Any, value: Any, otherwise: str) -> str:
    """`value` as `show` writes it, or other words for one that is no number."""
    return show(value) if isinstance(value, int | float) else otherwise


def _ranks(run: RunRecords) -> list[Block]:
    """The median step of each rank, if there are several: a slow one stands out."""
    found = []
    for process in run.processes[:MOST_RANKS]:
        for one in series_of(process)[:1]:
            if one.median_seconds is not None:
                found.append((process.name, one.median_seconds, max(s for _, s in one.seconds)))
    if len(found) < 2:
        return []
    usual = median(m for _, m, _ in found)
    least, most = min(m for _, m, _ in found), max(m for _, m, _ in found)
    told = f"From {format_seconds(least)} to {format_seconds(most)}."
    bars = draw_bars(
        [(name, m, "s2" if m > 1.2 * usual else "s1") for name, m, _ in found],
        "The median time of a step on each rank",
        told,
        format_seconds,
    )
    rows = [(name, format_seconds(m), format_seconds(high)) for name, m, high in found]
    return [
        PictureBlock(
            bars,
            f"The median time of a step on each rank. {told} One color marks ranks 20 % above the median.",
        ),
        table("Time of a step by rank", ("rank", "median", "longest"), rows, (1, 2), folded=True),
    ]
