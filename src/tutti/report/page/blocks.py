"""What a section of the page consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from tutti.report.page.drawing import clean

MOST_LETTERS = 160


@dataclass(frozen=True)
class PictureBlock:
    """A picture with its caption."""

    picture: Markup
    caption: str
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class TableBlock:
    """A table with a caption; `folded` ones open at a click. `numbers` are the columns of numbers."""

    caption: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    folded: bool = False
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Words:
    """A paragraph; `alert` ones stand out."""

    text: str
    alert: bool = False
    kind: ClassVar[str] = "words"


@dataclass(frozen=True)
class Verbatim:
    """A text as a terminal shows it."""

    text: str
    label: str
    kind: ClassVar[str] = "verbatim"


Block = PictureBlock | TableBlock | Words | Verbatim


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; `name` is its anchor."""

    name: str
    title: str
    blocks: tuple[Block, ...]


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: Sequence[int] = (),
    *,
    folded: bool = False,
    most: int = 400,
) -> TableBlock:
    """A table of at most `most` rows: of more, the first ones, and a caption that says so."""
    shown = [[short(cell) for cell in row] for row in rows[:most]]
    if len(rows) > most:
        caption += f" (the first {most} of {len(rows)})"
    return TableBlock(caption, tuple(head), shown, frozenset(numbers), folded)


def short(content: object) -> str:
    """A cell's text, not longer than a line or two."""
    words = "" if content is None else clean(content)
    return words if len(words) <= MOST_LETTERS else f"{words[: MOST_LETTERS - 1]}…"
