"""Draws a simulated step: as a staircase of text, and as one self-contained SVG image."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from tutti.errors import TuttiError
from tutti.pipeline.schedule.action import Action
from tutti.planner.simulator import Span, Timeline

# The most blocks of text in a readable drawing; beyond it, words are shortened.
_MOST_BLOCKS = 12


def staircase(timeline: Timeline, *, width: int = 120, label: str = "rank") -> str:
    """One row per rank, time from left to right in proportion, blanks for idle time.

    A word marks the begin of its action: `F0`, or `2F0` if a rank has several stages; dashes lead to the
    end of a long one. Columns beyond `width` continue below. `label` names the rows.
    """
    labels = [f"{label} {rank} " for rank in range(len(timeline.rows))]
    margin = max(map(len, labels))
    words = [[(_word(timeline, span.action), span) for span in row] for row in timeline.rows]
    spans = [(word, span) for row in words for word, span in row if span.end > span.start]
    if not spans:
        return "\n".join(label.rstrip() for label in labels)
    cell = max(len(word) for word, _ in spans) + 1
    room = max(1, (width - margin) // cell) * cell
    scale = min(
        cell / min(span.end - span.start for _, span in spans),
        room * _MOST_BLOCKS / timeline.seconds,
    )
    lines = [_line(row, scale) for row in words]
    blocks = [
        "\n".join(
            (label.ljust(margin) + line[at : at + room]).rstrip()
            for label, line in zip(labels, lines, strict=True)
        )
        for at in range(0, max(map(len, lines)), room)
    ]
    return "\n\n".join(blocks)


def _word(timeline: Timeline, action: Action) -> str:
    """The shortest text of an action."""
    several = timeline.schedule.num_stages > timeline.schedule.num_ranks
    return str(action) if several else str(action).removeprefix(str(action.stage))


def _line(row: list[tuple[str, Span]], scale: float) -> str:
    line = ""
    for word, span in row:
        start, end = round(span.start * scale), round(span.end * scale)
        # The last column stays blank, so that words never touch.
        line = line.ljust(start) + word.ljust(end - start - 1, "-")[: max(end - start - 1, 0)]
    return line


_COLORS = {
    "F": "#4c8bf5",
    "B": "#3fa66b",
    "I": "#5cc2a0",
    "W": "#f2b84b",
    "G": "#b59bd6",
    "A": "#999",
}
_MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "G": "gather",
    "A": "reduce",
}
_LEFT, _TOP, _ROW, _DRAWN, _RIGHT = 64, 36, 34, 1100, 110


def write_svg(timeline: Timeline, path: Path) -> None:
    """Draw `svg` into a file.

    Raises:
        TuttiError: the file cannot be written.
    """
    try:
        path.write_text(svg(timeline))
    except OSError as error:
        raise TuttiError(f"cannot write {path}", why=str(error.strerror)) from None


def svg(timeline: Timeline) -> str:
    """The step as an SVG image: a row per rank, colors by kind, micro-batch numbers, time and idle share.

    If a rank has several stages, the stage is above the micro-batch, and later stages are darker.
    """
    height = _TOP + _ROW * len(timeline.rows) + 56
    scale = _DRAWN / timeline.seconds if timeline.seconds else 0.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _DRAWN + _RIGHT}" height="{height}" '
        f'viewBox="0 0 {_LEFT + _DRAWN + _RIGHT} {height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(timeline),
    ]
    for rank, row in enumerate(timeline.rows):
        parts += _rank(timeline, rank, row, scale)
    parts += _axis(timeline, scale)
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}"{more}>{escape(text)}</text>'


def _legend(timeline: Timeline) -> Iterator[str]:
    present = {span.action.kind for row in timeline.rows for span in row}
    x = _LEFT
    for kind in (kind for kind in _COLORS if kind in present):
        yield f'<rect x="{x}" y="10" width="14" height="14" fill="{_COLORS[kind]}"/>'
        yield _text(x + 19, 21, f"{kind} {_MEANINGS[kind]}")
        x += 150
    yield _text(x, 21, f"idle {timeline.idle_share:.1%}", ' font-weight="bold"')


def _rank(timeline: Timeline, rank: int, row: tuple[Span, ...], scale: float) -> Iterator[str]:
    y = _TOP + _ROW * rank
    idle = timeline.idle_seconds[rank] / timeline.seconds if timeline.seconds else 0.0
    yield _text(8, y + 20, f"rank {rank}")
    yield f'<rect x="{_LEFT}" y="{y}" width="{_DRAWN}" height="{_ROW - 4}" fill="#f0f0f0"/>'
    for span in row:
        yield from _box(timeline, rank, span, y, scale)
    yield _text(_LEFT + _DRAWN + 8, y + 20, f"idle {idle:.1%}")


def _box(timeline: Timeline, rank: int, span: Span, y: float, scale: float) -> Iterator[str]:
    action = span.action
    stages = timeline.schedule.stages_of(rank)
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    told = f"{action}: {span.start:g} to {span.end:g}"
    yield (
        f'<g><title>{escape(told)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{_ROW - 4}" fill="{_COLORS[action.kind]}" stroke="white" stroke-width="0.6"/>'
    )
    if later := stages.index(action.stage):
        shade = 0.35 * later / (len(stages) - 1)
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 4}" '
            f'fill="black" fill-opacity="{shade:.2f}"/>'
        )
    number = str(action.micro) if action.computes else action.kind
    # About 7 units a digit: only the title shows a number that does not fit into its box.
    if width >= 7 * len(number):
        middle, centered = x + width / 2, ' text-anchor="middle"'
        yield _text(middle, y + (25 if len(stages) > 1 else 20), number, centered)
        if len(stages) > 1:
            yield _text(middle, y + 11, str(action.stage), centered + ' font-size="9"')
    yield "</g>"


def _axis(timeline: Timeline, scale: float) -> Iterator[str]:
    y = _TOP + _ROW * len(timeline.rows) + 4
    yield f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + _DRAWN}" y2="{y}" stroke="black"/>'
    step = _tick(timeline.seconds)
    for i in range(math.floor(timeline.seconds / step * (1 + 1e-9)) + 1):
        x = _LEFT + i * step * scale
        yield f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 5}" stroke="black"/>'
        yield _text(x, y + 19, f"{i * step:g}", ' text-anchor="middle"')
    yield _text(_LEFT, y + 38, f"time; the step takes {timeline.seconds:g}")


def _tick(seconds: float) -> float:
    """The distance of about ten ticks: 1, 2 or 5 times a power of ten."""
    if seconds <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(seconds / 10))
    return next(power * k for k in (1, 2, 5, 10) if power * k * 10 >= seconds * (1 - 1e-9))
