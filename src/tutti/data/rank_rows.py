"""The rows of a global batch that each rank reads."""

from __future__ import annotations

from tutti.layout import Layout

# The axes that split the rows of a batch, major to minor.
SPLIT_AXES = ("replica", "data")


def num_shares(layout: Layout) -> int:
    """The number of parts into which ranks divide a batch; workers of servers read the whole batch."""
    if layout.server:
        return 1
    return layout.axes.get("replica", 1) * layout.axes.get("data", 1)


def is_split(num_rows: int, layout: Layout) -> bool:
    """Whether ranks divide a batch of this many rows; otherwise each reads all of them."""
    shares = num_shares(layout)
    return shares > 1 and num_rows > 0 and num_rows % shares == 0


def rows(num_rows: int, layout: Layout, rank: int) -> range:
    """The rows of a batch that `rank` reads: one block, the same for ranks that differ in other axes only.

    >>> rows(8, Layout.parse("data=2 tensor=2"), rank=3)
    range(4, 8)
    """
    if not is_split(num_rows, layout):
        return range(num_rows)
    coordinates = layout.mesh.coordinates(rank)
    axes = [a for a in SPLIT_AXES if a in layout.mesh]
    size = num_rows // num_shares(layout)
    first = layout.mesh.index(axes, coordinates) * size
    return range(first, first + size)
