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


def merged(spans: Iterable[TimedSpan], least: float) -> list[TimedSpan]:
    """Neighbors of one class with a gap below `least` seconds as one, so that long rows stay small."""
    found: list[TimedSpan] = []
    for span in sorted(spans, key=lambda s: s.start):
        last = found[-1] if found else None
        tiny = last is not None and (last.end - last.start < least or span.end - span.start < least)
        if last is not None and last.cls == span.cls and span.start - last.end < least and tiny:
            told = last.told if last.told.endswith("and others") else f"{last.told} and others"
            found[-1] = TimedSpan(last.start, max(last.end, span.end), last.cls, told)
        else:
            found.append(span)
    return found
