"""Which rows of a batch each rank reads."""

from __future__ import annotations

import pytest

from tutti.data.rank_rows import is_split, num_shares, rows
from tutti.layout import Layout

LAYOUTS = [
    "",
    "data=2",
    "data=3 tensor=2",
    "pipe=2 data=2 micro=2",
    "replica=2 sync=average(every=1)",
    "replica=2 pipe=2 data=2 tensor=2 sync=average(every=1)",
    "tensor=2 seq=2",
    "expert=2 data=2",
]


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("num_rows", range(1, 25))
def test_ranks_of_one_coordinate_along_the_other_axes_read_each_row_once(
    text: str, num_rows: int
) -> None:
    layout = Layout.parse(text)
    mesh = layout.mesh
    split = [a for a in ("replica", "data") if a in mesh]
    for rank in range(mesh.num_ranks):
        here = mesh.coordinates(rank)
        read = rows(num_rows, layout, rank)
        if not is_split(num_rows, layout):
            assert read == range(num_rows)
            continue
        # Blocks in the order of replica, then data; the other axes do not matter.
        block = here.get("replica", 0) * layout.axes.get("data", 1) + here.get("data", 0)
        size = num_rows // num_shares(layout)
        assert read == range(block * size, (block + 1) * size)
        alike = [r for r in range(mesh.num_ranks) if rows(num_rows, layout, r) == read]
        assert alike == [
            r
            for r in range(mesh.num_ranks)
            if all(mesh.coordinates(r)[a] == here[a] for a in split)
        ]


def test_workers_of_servers_read_the_whole_batch() -> None:
    layout = Layout.parse("replica=2 server=1 sync=async")
    assert num_shares(layout) == 1 and rows(8, layout, 1) == range(8)
