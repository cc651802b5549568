"""The ranks of a group on hosts, against a count over all ranks."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from tutti.costs.rank_groups import RankGroups
from tutti.layout import Layout


@pytest.mark.parametrize("host_size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "text", ["data=8", "data=4 tensor=2", "pipe=2 data=2 tensor=4", "tensor=3 data=2"]
)
def test_counts_equal_those_of_all_ranks(text: str, host_size: int) -> None:
    mesh = Layout.parse(text).mesh
    groups = RankGroups(mesh, host_size)
    names = list(mesh)
    for axes in chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1)):
        others = [a for a in names if a not in axes]
        first = [
            rank
            for rank in range(mesh.num_ranks)
            if all(mesh.coordinates(rank)[a] == 0 for a in others)
        ]
        assert groups[axes].size == len(first)
        assert groups[axes].per_host == sum(1 for rank in first if rank < host_size)


def test_axes_of_size_one_have_one_rank() -> None:
    groups = RankGroups(Layout.parse("data=2").mesh, 8)
    assert groups["tensor",].size == 1
    assert groups["data", "tensor"].size == 2


def test_neighbors_on_other_hosts() -> None:
    groups = RankGroups(Layout.parse("pipe=2 tensor=4").mesh, 4)
    assert groups.crosses_hosts("pipe")
    assert not groups.crosses_hosts("tensor")
