"""Rows of spans over time: a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tutti.report.page.drawing import legend, line, picture, rect, text, ticks

_LEFT, _RIGHT, _TOP, _ROW, _DRAWN = 84.0, 16.0, 30.0, 26.0, 900.0
_LETTER = 7.0  # the width of a letter


@dataclass(frozen=True)
class TimedSpan:
    """From `start` to `end` (seconds), its class, its words, and a short text for its box."""

    start: float
    end: float
    cls: str
    told: str
    word: str = ""


def draw_rows(
    rows: Sequence[tuple[str, Sequence[TimedSpan]]],
    title: str,
    description: str,
    meanings: Iterable[tuple[str, str]],
    show: Callable[[float], str],
) -> Markup:
    """One row for each name, time from left to right, from 0."""
    seconds = max((s.end for _, row in rows for s in row), default=0.0) or 1.0
    scale = _DRAWN / seconds
    shapes = list(legend(_LEFT, 16, meanings))
    for i, (name, row) in enumerate(rows):
        y = _TOP + _ROW * i
        shapes.append(text(_LEFT - 8, y + 15, name, "end"))
        shapes.append(rect(_LEFT, y, _DRAWN, _ROW - 5, "idle"))
        for span in row:
            width = max((span.end - span.start) * scale, 0.4)
            x = _LEFT + span.start * scale
            shapes.append(rect(x, y, width, _ROW - 5, span.cls, span.told))
            if span.word and width > _LETTER * len(span.word) + 2:
                shapes.append(text(x + width / 2, y + 15, span.word, "middle", "on"))
    bottom = _TOP + _ROW * len(rows)
    shapes.append(line(_LEFT, bottom, _LEFT + _DRAWN, bottom, "axis"))
    for at in ticks(0.0, seconds, 8):
        shapes.append(text(_LEFT + at * scale, bottom + 16, show(at), "middle"))
    return picture(_LEFT + _DRAWN + _RIGHT + 20, bottom + 24, title, description, shapes)


def binned(spans: Sequence[TimedSpan], seconds: float, most: int) -> list[TimedSpan]:
    """At most `most` spans for the time from 0 to `seconds`: of more, each share of it shows the class that
    takes most of it, idle time included."""
    if len(spans) <= most:
        return list(spans)
    width = seconds / most
    time_of: list[dict[str, float]] = [{} for _ in range(most)]
    for span in spans:
        for k in range(int(span.start / width), min(most - 1, int(span.end / width)) + 1):
            inside = min(span.end, (k + 1) * width) - max(span.start, k * width)
            time_of[k][span.cls] = time_of[k].get(span.cls, 0.0) + max(inside, 0.0)
    found: list[TimedSpan] = []
    for k, times in enumerate(time_of):
        idle = width - sum(times.values())
        cls, longest = max(times.items(), key=lambda entry: entry[1], default=("", 0.0))
        if longest <= max(idle, 0.0):
            continue
        if found and found[-1].cls == cls and found[-1].end > (k - 0.5) * width:
            found[-1] = TimedSpan(found[-1].start, (k + 1) * width, cls, "")
        else:
            found.append(TimedSpan(k * width, (k + 1) * width, cls, ""))
    return found
