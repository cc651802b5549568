"""The layout of a command's option, where `auto` has no meaning."""

from __future__ import annotations

from tutti.errors import LayoutError
from tutti.layout import Layout


def given_layout(text: str) -> Layout:
    """The layout of `text`.

    Raises:
        LayoutError: it is no layout, or has the word `auto`.
    """
    refuse_auto(text)
    return Layout.parse(text)


def refuse_auto(text: str) -> None:
    """Raise `LayoutError` for `auto`, which this command cannot choose."""
    if "auto" in text.split():
        raise LayoutError(
            f'"auto" in layout "{text}"',
            why="tutti run and tutti.distribute alone take it: they choose a layout for the ranks that run",
            fix="the words of a layout, such as data=8; tutti plan ranks all layouts of any devices",
        )
