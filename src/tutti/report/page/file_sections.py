"""The sections of files beside the records: the verdict of `verify`, and a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tutti.quantities import format_nbytes, format_seconds
from tutti.report.page.blocks import Block, PictureBlock, Section, Verbatim, Words, table
from tutti.report.page.run_records import Event
from tutti.report.page.value_bars import draw_bars

MOST_LAYOUTS, MOST_BARS = 200, 15


def verdict(found: Event | None, used: str) -> Section | None:
    """The proof that the parallel step is the same step; `used` is the layout of the run."""
    if found is None:
        return None
    ok = found.get("ok") is True
    word = "The same step" if ok else "NOT the same step"
    layout = found.get("layout", "")
    blocks: list[Block] = [Words(f"{word}, under {layout}.", alert=not ok)]
    if used and sorted(str(layout).split()) != sorted(used.split()):
        blocks.append(Words(f"The run has another layout: {used}.", alert=True))
    rows = [
        ("partition, in float64", _error(found.get("max_error")), str(found.get("worst") or "")),
        ("capture", _error(found.get("capture_error")), str(found.get("worst_capture") or "")),
    ]
    blocks.append(table("Errors of the verdict", ("comparison", "largest error", "in"), rows, (1,)))
    if text := found.get("text"):
        blocks.append(Verbatim(str(text)[:8000], "What tutti verify printed"))
    return Section("verify", "Verification", tuple(blocks))


def _error(value: Any) -> str:
    if not _is_number(value):
        return str(value)
    return f"{value:.1e}" if value else "exact"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plan(found: Event | None, used: str) -> Section | None:
    """The layouts of a plan beside each other; `used` is the run's."""
    if found is None:
        return None
    every = found.get("layouts")
    layouts = [x for x in every if isinstance(x, dict)] if isinstance(every, list) else []
    if not layouts:
        return Section("plan", "Plan", (Words("The plan lists no layouts."),))
    layouts.sort(key=_order)
    blocks: list[Block] = []
    timed = [x for x in layouts if _is_number(x.get("seconds"))][:MOST_BARS]
    if timed:
        rows = [
            (_name(x, used), float(x["seconds"]), "s1" if x.get("fits") else "s6") for x in timed
        ]
        told = f"{len(layouts)} layouts; the fastest that fits is {_fastest(layouts)}."
        bars = draw_bars(rows, "Predicted time of a step by layout", told, format_seconds)
        blocks.append(PictureBlock(bars, f"Predicted time of a step by layout. {told}"))
    cells = [
        (
            _name(x, used),
            format_seconds(x["seconds"]) if _is_number(x.get("seconds")) else "",
            format_nbytes(x["peak_nbytes"]) if _is_number(x.get("peak_nbytes")) else "",
            "yes" if x.get("fits") else "no",
        )
        for x in layouts
    ]
    head = ("layout", "step, predicted", "peak memory", "fits")
    blocks.append(table("Layouts of the plan", head, cells, (1, 2), most=MOST_LAYOUTS))
    return Section("plan", "Plan", tuple(blocks))


def _order(x: Mapping[str, Any]) -> tuple[bool, float]:
    return not x.get("fits"), float(x["seconds"]) if _is_number(x.get("seconds")) else math.inf


def _name(x: Mapping[str, Any], used: str) -> str:
    name = str(x.get("layout") or "one device")
    return f"{name} (this run)" if used and sorted(name.split()) == sorted(used.split()) else name


def _fastest(layouts: Sequence[Mapping[str, Any]]) -> str:
    first = layouts[0]
    return str(first.get("layout") or "one device") if first.get("fits") else "none"
