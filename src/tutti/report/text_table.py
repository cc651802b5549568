"""A table as plain text."""

from __future__ import annotations

from collections.abc import Iterable


def columns(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A head and rows, each column as wide as its widest cell."""
    table = [list(head), *map(list, rows)]
    widths = [max(len(r[i]) for r in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
