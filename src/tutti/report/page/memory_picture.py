"""The predicted memory over the positions of a program, against its bounds; and its kinds at the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from tutti.quantities import format_nbytes
from tutti.report.page.drawing import legend, line, picture, rect, shape_with, text, ticks

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860.0, 280.0, 76.0, 20.0, 34.0, 30.0
KINDS = (("state", "s1"), ("gradient", "s2"), ("activation", "s3"), ("other", "s4"))
_REGIONS = {"forward": "s1", "backward": "s3", "update": "s2"}
# A bound above this many times the peak would leave the course as a flat line.
_FAR = 2.5


def draw_course(
    memory: Mapping[str, Any], bounds: Sequence[tuple[str, int]], title: str
) -> Markup | None:
    """The bytes held at each position, and lines for the predicted peak and other bounds; None without a
    course.

    Args:
        memory: of `memory_course.memory_facts`.
        bounds: names and bytes; those far above the peak are left out.
        title: of the picture.
    """
    course = memory.get("course") or []
    if not course:
        return None
    peak = int(memory["peak_nbytes"])
    near = [(name, n) for name, n in bounds if n <= _FAR * peak]
    high = 1.12 * max([peak, *(n for _, n in near)])
    scale = (_HEIGHT - _TOP - _BOTTOM) / high
    regions = list(dict.fromkeys(str(region) for region, *_ in course))
    shapes = [*legend(_LEFT, 14, [(_class(r), r or "other") for r in regions[:6]])]
    shapes += _axes(high, scale)
    shapes += _bars(course, scale)
    labels = [("predicted peak", peak), *near]
    shapes += _bounds(labels, scale)
    held = peak - int(memory["call_nbytes"])
    told = (
        f"{len(course)} positions; the peak of {format_nbytes(peak)} is at {memory['op']}, "
        f"{memory['source']}; {format_nbytes(held)} are held before and after the call."
    )
    return picture(_WIDTH, _HEIGHT, title, told, shapes)


def _class(region: str) -> str:
    return _REGIONS.get(region, "s6")


def _axes(high: float, scale: float) -> Iterator[str]:
    bottom = _HEIGHT - _BOTTOM
    for value in ticks(0.0, high, 5):
        yield line(_LEFT, bottom - value * scale, _WIDTH - _RIGHT, bottom - value * scale, "grid")
        yield text(_LEFT - 6, bottom - value * scale + 4, format_nbytes(value), "end")
    yield line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, "axis")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield text(middle, _HEIGHT - 8, "position in the program", "middle", "muted")


def _bars(course: Sequence[Sequence[Any]], scale: float) -> Iterator[str]:
    """One step-shaped area for each run of positions of one region."""
    width, bottom, at = (_WIDTH - _LEFT - _RIGHT) / len(course), _HEIGHT - _BOTTOM, 0
    for region, run in groupby(course, lambda entry: str(entry[0])):
        words = [f"M{_LEFT + at * width:.1f} {bottom:.1f}"]
        highest: Sequence[Any] = ("", -1, "", "")
        for entry in run:
            words.append(f"V{bottom - entry[1] * scale:.1f}h{width:.2f}")
            highest, at = max(highest, entry, key=lambda e: e[1]), at + 1
        _, nbytes, op, source = highest
        told = f"{region or 'other'}: up to {format_nbytes(nbytes)}, at {op}, {source}"
        yield shape_with("".join([*words, f"V{bottom:.1f}Z"]), _class(region), told)


def _bounds(bounds: Sequence[tuple[str, int]], scale: float) -> Iterator[str]:
    for i, (name, nbytes) in enumerate(bounds):
        y = _HEIGHT - _BOTTOM - nbytes * scale
        yield line(_LEFT, y, _WIDTH - _RIGHT, y, "bound")
        x = _WIDTH - _RIGHT - 4 - 230 * (i % 3)
        yield text(x, y - 5, f"{name} {format_nbytes(nbytes)}", "end", "small")


def draw_kinds(memory: Mapping[str, Any]) -> Markup:
    """The kinds of bytes at the peak, as one bar."""
    numbers = [(name, cls, int(memory[f"{name}_nbytes"])) for name, cls in KINDS]
    total = sum(n for *_, n in numbers) or 1
    entries = [(cls, f"{name} {format_nbytes(n)}") for name, cls, n in numbers]
    shapes, x = [*legend(0, 12, entries)], 0.0
    for name, cls, n in numbers:
        width = n / total * 860
        shapes.append(rect(x, 24, width, 26, cls, f"{name} {format_nbytes(n)}"))
        if width > 60:
            shapes.append(text(x + width / 2, 41, f"{n / total:.0%}", "middle", "on"))
        x += width
    told = ", ".join(f"{name} {n / total:.0%}" for name, _, n in numbers)
    return picture(860, 54, "The kinds of memory at the peak", told, shapes)
