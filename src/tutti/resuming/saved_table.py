"""The saved steps of a folder, as a table or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from tutti.quantities import format_nbytes
from tutti.report.text_table import columns
from tutti.resuming.retention import Retention, best_name
from tutti.resuming.run_folder import SavedStep

_HEAD = ("step", "saved", "size", "layout", "metrics", "state")


def saved_table(saved: Sequence[SavedStep], *, checked: bool) -> str:
    """A line for each saved step; "whole" is by sizes, or if `checked` by checksums."""
    best = best_of(saved)
    rows = [
        (
            str(one.step),
            time.strftime("%F %T", time.localtime(one.record.time)) if one.record else "",
            format_nbytes(one.nbytes) if one.record else "",
            (one.layout or "one device") if one.record else "",
            " ".join(f"{n}={x:.4g}" for n, x in one.record.metrics.items()) if one.record else "",
            _state(one, checked) + (", best" if one is best else ""),
        )
        for one in saved
    ]
    return columns(_HEAD, rows)


def saved_json(saved: Sequence[SavedStep], *, checked: bool) -> str:
    """The same as a JSON list."""
    best = best_of(saved)
    rows: list[dict[str, Any]] = [
        {
            "step": one.step,
            "path": str(one.path),
            "time": one.record.time if one.record else None,
            "nbytes": one.nbytes,
            "layout": one.layout,
            "metrics": dict(one.record.metrics) if one.record else {},
            "whole": not one.damage,
            "checked": checked,
            "damage": one.damage,
            "index_damage": one.index,
            "best": one is best,
        }
        for one in saved
    ]
    return json.dumps(rows, indent=2)


def best_of(saved: Sequence[SavedStep]) -> SavedStep | None:
    """The best by the metric of the newest whole one; None if it has none."""
    whole = [one for one in saved if not one.damage and one.record is not None]
    best = best_name(whole)
    return Retention(best=best).best_of(whole) if best else None


def _state(one: SavedStep, checked: bool) -> str:
    if one.damage:
        return f"damaged: {one.damage}"
    if one.index:
        return f"whole for tutti; {one.index}"
    return "whole, checksums right" if checked else "whole"
