"""Cases that meet rows of layouts in turn: every row has its share of the cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle


def in_turn(names: Iterable[str], rows: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Each name with the layouts of one row, the rows in turn."""
    return [(name, layout) for name, row in zip(names, cycle(rows)) for layout in row]
