"""Inline SVG: the colors of shapes are classes of the page's style, which has a light and a dark theme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from zlib import crc32

from markupsafe import Markup, escape

# Classes for series; `style.css` has their colors in both themes.
SERIES = ("s1", "s2", "s3", "s4", "s5", "s6")


def clean(text: object) -> str:
    """`text` without the control characters that HTML forbids."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(text))


def picture(
    width: float, height: float, title: str, description: str, shapes: Iterable[str]
) -> Markup:
    """An SVG image with a title and a description for readers of screens."""
    drawn = "".join(shapes)
    number = f"{crc32(f'{title}{description}{drawn}'.encode(errors='replace')):08x}"
    return Markup(  # noqa: S704  # texts are escaped here and in the shapes
        f'<svg role="img" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'aria-labelledby="t{number} d{number}"><title id="t{number}">{escape(clean(title))}</title>'
        f'<desc id="d{number}">{escape(clean(description))}</desc>{drawn}</svg>'
    )


def text(x: float, y: float, content: object, anchor: str = "start", cls: str = "") -> str:
    """A text at a point; `anchor`: start, middle or end."""
    more = f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += f' class="{cls}"' if cls else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{more}>{escape(clean(content))}</text>'


def rect(x: float, y: float, width: float, height: float, cls: str, told: str = "") -> str:
    """A rectangle; `told` is shown under the mouse."""
    shape = f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" class="{cls}"'
    return f"{shape}><title>{escape(clean(told))}</title></rect>" if told else f"{shape}/>"


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    """A straight line."""
    return f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{cls}"/>'


def path(points: Iterable[tuple[float, float] | None], cls: str, *, closed: bool = False) -> str:
    """A line through points; None begins a new piece."""
    words, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        words.append(f"{pen}{_n(point[0])} {_n(point[1])}")
        pen = "L"
    return f'<path d="{"".join(words)}{"Z" if closed else ""}" class="{cls}"/>' if words else ""


def shape_with(d: str, cls: str, told: str) -> str:
    """A path of SVG's own words, with a text shown under the mouse."""
    return f'<path d="{d}" class="{cls}"><title>{escape(clean(told))}</title></path>'


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most some `most`."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * k for k in (1, 2, 5, 10) if power * k * most >= span * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def legend(x: float, y: float, entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Boxes with their meaning, side by side: (class, text)."""
    for cls, meaning in entries:
        yield rect(x, y - 10, 12, 12, cls)
        yield text(x + 17, y, meaning)
        x += 17 + 7 * len(meaning) + 22


def _n(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")
