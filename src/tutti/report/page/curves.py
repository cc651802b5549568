"""Curves over the steps of a run: the loss, the seconds of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tutti.report.page.drawing import SERIES, line, path, picture, text, ticks

WIDTH, HEIGHT = 860.0, 280.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 20.0, 22.0, 40.0
MOST_POINTS = 600
# The part of the values that a cut axis shows.
_SHOWN = 0.99


@dataclass(frozen=True)
class Curve:
    """A named line of (step, value); values that are no numbers are gaps, with a cross."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Scale:
    """The picture's coordinates of a range of steps and values."""

    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        """From left to right."""
        low, high = self.steps
        return _LEFT + (step - low) / ((high - low) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Large values are above."""
        low, high = self.values
        room = HEIGHT - _TOP - _BOTTOM
        return HEIGHT - _BOTTOM - (min(value, high) - low) / ((high - low) or 1.0) * room


def draw_curves(
    curves: Sequence[Curve],
    title: str,
    *,
    show: Callable[[float], str] = "{:.4g}".format,
    marks: Sequence[tuple[float, str]] = (),
    cut: bool = False,
    zero: bool = False,
) -> Markup | None:
    """The curves as one picture; None without a number.

    Args:
        curves: of at least one point together.
        title: of the picture.
        show: a value as text.
        marks: steps with a name each, drawn as vertical lines.
        cut: whether few extreme values may be above the picture.
        zero: whether the axis of values begins at 0.
    """
    numbers = sorted(y for c in curves for _, y in c.points if math.isfinite(y))
    if not numbers:
        return None
    steps = [x for c in curves for x, _ in c.points]
    high = numbers[min(len(numbers) - 1, int(_SHOWN * len(numbers)))] if cut else numbers[-1]
    low = 0.0 if zero else numbers[0]
    pad = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    scale = Scale((min(steps), max(steps)), (low if zero else low - pad, high + pad))
    above = sum(y > scale.values[1] for y in numbers)
    last = ", ".join(f"{c.name} {show(y)}" for c in curves for y in [_last(c)] if y is not None)
    told = f"Steps {min(steps):g} to {max(steps):g}; {show(numbers[0])} to {show(numbers[-1])}; last: {last}."
    shapes = [*_axes(scale, show), *_marks(scale, marks)]
    for i, curve in enumerate(curves):
        shapes += _drawn(scale, curve, i)
    if above:
        shapes.append(text(WIDTH - _RIGHT, 14, f"{above} above the picture", "end", "muted"))
    if len(curves) > 1:
        shapes += _names(curves)
    return picture(WIDTH, HEIGHT, title, told, shapes)


def _last(curve: Curve) -> float | None:
    return next((y for _, y in reversed(curve.points) if math.isfinite(y)), None)


def _axes(scale: Scale, show: Callable[[float], str]) -> Iterator[str]:
    for value in ticks(*scale.values):
        y = scale.y(value)
        yield line(_LEFT, y, WIDTH - _RIGHT, y, "grid")
        yield text(_LEFT - 6, y + 4, show(value), "end")
    for step in (s for s in ticks(*scale.steps, most=8) if s == round(s)):
        yield text(scale.x(step), HEIGHT - _BOTTOM + 17, f"{step:g}", "middle")
    yield line(_LEFT, HEIGHT - _BOTTOM, WIDTH - _RIGHT, HEIGHT - _BOTTOM, "axis")
    yield text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, "step", "middle", "muted")


def _marks(scale: Scale, marks: Sequence[tuple[float, str]]) -> Iterator[str]:
    low, high = scale.steps
    for step, name in marks:
        if low <= step <= high:
            x = scale.x(step)
            yield line(x, _TOP, x, HEIGHT - _BOTTOM, "mark")
            yield text(x + 3, _TOP + 9, name, cls="muted small")


def _drawn(scale: Scale, curve: Curve, number: int) -> Iterator[str]:
    cls = SERIES[number % len(SERIES)]
    bins = list(_bins(curve.points))
    if any(b.high > b.low for b in bins):
        yield from _bands(scale, bins, cls)
    places = [(scale.x(b.step), scale.y(b.mean)) if b.count else None for b in bins]
    yield path(places, f"curve {cls} dash{number % 4}")
    lone = [p for i, p in enumerate(places) if p and not _has_neighbor(places, i)]
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" class="{cls}"/>' for x, y in lone)
    for b in bins:
        if b.num_missing:
            x, y = scale.x(b.step), HEIGHT - _BOTTOM - 6
            yield path(
                [(x - 4, y - 4), (x + 4, y + 4), None, (x - 4, y + 4), (x + 4, y - 4)], "cross"
            )


def _has_neighbor(places: Sequence[object], i: int) -> bool:
    return any(places[k] is not None for k in (i - 1, i + 1) if 0 <= k < len(places))


@dataclass(frozen=True)
class _Bin:
    """Points that fall together: their mean step, values, and how many are no numbers."""

    step: float
    count: int
    mean: float
    low: float
    high: float
    num_missing: int


def _bins(points: Sequence[tuple[float, float]]) -> Iterator[_Bin]:
    size = max(1, -(-len(points) // MOST_POINTS))
    for at in range(0, len(points), size):
        some = points[at : at + size]
        step = sum(x for x, _ in some) / len(some)
        known = [y for _, y in some if math.isfinite(y)]
        missing = len(some) - len(known)
        if known:
            mean = sum(known) / len(known)
            yield _Bin(step, len(known), mean, min(known), max(known), missing)
        else:
            yield _Bin(step, 0, 0.0, 0.0, 0.0, missing)


def _bands(scale: Scale, bins: Sequence[_Bin], cls: str) -> Iterator[str]:
    """The areas from the lowest to the highest value of each bin."""
    piece: list[_Bin] = []
    for b in [*bins, None]:
        if b is not None and b.count:
            piece.append(b)
            continue
        if len(piece) > 1:
            upper = [(scale.x(p.step), scale.y(p.high)) for p in piece]
            lower = [(scale.x(p.step), scale.y(p.low)) for p in reversed(piece)]
            yield path([*upper, *lower], f"band {cls}", closed=True)
        piece = []


def _names(curves: Sequence[Curve]) -> Iterator[str]:
    x = _LEFT
    for i, curve in enumerate(curves[: len(SERIES)]):
        yield line(x, 9, x + 26, 9, f"curve {SERIES[i]} dash{i % 4}")
        yield text(x + 31, 13, curve.name[:24])
        x += 31 + 7 * len(curve.name[:24]) + 24
