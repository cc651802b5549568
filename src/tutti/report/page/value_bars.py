"""Horizontal bars: names with one value each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from tutti.report.page.drawing import picture, rect, text

_BAR, _ROW, _LETTER = 440.0, 22.0, 7.0
_MOST_LETTERS = 46


def draw_bars(
    rows: Sequence[tuple[str, float, str]],
    title: str,
    description: str,
    show: Callable[[float], str],
) -> Markup:
    """A bar for each row of (name, value, class)."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    left = 12 + _LETTER * max((min(len(n), _MOST_LETTERS) for n, *_ in rows), default=0)
    shapes = []
    for i, (name, value, cls) in enumerate(rows):
        y = _ROW * i
        short = name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"
        shapes.append(text(left - 8, y + 15, short, "end"))
        shapes.append(rect(left, y + 3, max(value / most * _BAR, 1.0), _ROW - 6, cls, name))
        shapes.append(text(left + value / most * _BAR + 6, y + 15, show(value)))
    return picture(left + _BAR + 90, _ROW * len(rows) + 4, title, description, shapes)
