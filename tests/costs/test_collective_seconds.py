"""Collectives against their closed forms, on links of round numbers; monotony on those of the files."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tutti.costs.collective_seconds import (
    RankGroup,
    collective_seconds,
    message_seconds,
    ring_seconds,
    sent_nbytes,
    tree_seconds,
)
from tutti.errors import PlanError
from tutti.hardware import catalog
from tutti.hardware.figures import Figure
from tutti.hardware.link import Link
from tutti.hardware.topology import Topology

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def figure(value: float) -> Figure:
    return Figure(value, "of this test")


def round_link(bandwidth: float, latency: float, copy: Figure | None = None) -> Link:
    return Link(
        name="of this test",
        bandwidth=figure(bandwidth),
        efficiency=figure(0.5),
        copy_bandwidth=copy,
        latency=figure(latency),
        start=figure(3e-6),
        message_efficiency=figure(0.25),
    )


# 100 GB/s inside, of which collectives reach 50; 20 GB/s an adapter, of which they reach 10; 4 for 8 devices.
INSIDE, BETWEEN = round_link(100e9, 1e-6), round_link(20e9, 5e-6)
TOPOLOGY = Topology("of this test", figure(8), INSIDE, BETWEEN, figure(4))
LARGE = 1e9


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_ring_within_a_host(n: int) -> None:
    """2(n-1)/n of the bytes for an all-reduce, (n-1)/n for the others."""
    group = RankGroup(n, n)
    expected = 3e-6 + 2 * (n - 1) * 1e-6 + 2 * (n - 1) / n * LARGE / 50e9
    assert collective_seconds("all_reduce", LARGE, group, TOPOLOGY) == pytest.approx(expected)
    once = 3e-6 + (n - 1) * 1e-6 + (n - 1) / n * LARGE / 50e9
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert collective_seconds(kind, LARGE, group, TOPOLOGY) == pytest.approx(once)


def test_a_gather_and_a_scatter_make_an_all_reduce() -> None:
    parts = [
        ring_seconds(kind, LARGE, 8, INSIDE, 50e9) for kind in ("reduce_scatter", "all_gather")
    ]
    assert ring_seconds("all_reduce", LARGE, 8, INSIDE, 50e9) == pytest.approx(sum(parts))


def test_the_copy_through_memory_comes_on_top() -> None:
    copied = replace(TOPOLOGY, inside=round_link(100e9, 1e-6, figure(500e9)))
    group = RankGroup(8, 8)
    more = collective_seconds("all_reduce", LARGE, group, copied)
    assert more - collective_seconds("all_reduce", LARGE, group, TOPOLOGY) == pytest.approx(
        LARGE / 500e9
    )


def test_a_small_all_reduce_takes_a_tree() -> None:
    """2 log2(n) steps instead of 2(n-1)."""
    assert tree_seconds(0, 8, INSIDE, 50e9) == pytest.approx(6e-6)
    assert collective_seconds("all_reduce", 8, RankGroup(8, 8), TOPOLOGY) == pytest.approx(
        9e-6, rel=1e-3
    )
    assert tree_seconds(LARGE, 8, INSIDE, 50e9) > ring_seconds("all_reduce", LARGE, 8, INSIDE, 50e9)


def test_between_hosts_each_device_has_half_an_adapter() -> None:
    """4 adapters for 8 devices: 5 GB/s each."""
    expected = 3e-6 + 2 * 3 * 5e-6 + 2 * 3 / 4 * LARGE / 5e9
    assert collective_seconds("all_reduce", LARGE, RankGroup(4, 1), TOPOLOGY) == pytest.approx(
        expected
    )


def test_an_all_to_all_between_hosts_crosses_the_adapters_with_all_parts_for_them() -> None:
    """24 of 32 parts of 1/32 at 5 GB/s, 7 at 50 GB/s: no sum within a host makes them fewer."""
    expected = 3e-6 + 3 * 5e-6 + 24 / 32 * LARGE / 5e9 + 7 * 1e-6 + 7 / 32 * LARGE / 50e9
    found = collective_seconds("all_to_all", LARGE, RankGroup(32, 8), TOPOLOGY)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "near"), [(1, 1), (8, 8), (4, 1), (32, 8), (8, 2)])
def test_bytes_by_level_add_up_to_those_of_a_ring(kind: str, size: int, near: int) -> None:
    inside, between = sent_nbytes(kind, LARGE, RankGroup(size, near))
    passes = 2 if kind == "all_reduce" else 1
    assert inside + between == pytest.approx(passes * (size - 1) / size * LARGE)
    if kind == "all_to_all":
        assert between == pytest.approx((size - near) / size * LARGE)
    else:  # each rank of a host has its part of the sums
        assert between == pytest.approx(passes * (size // near - 1) / size * LARGE)


def test_a_group_of_whole_hosts_goes_by_level() -> None:
    """Each of 8 ranks of a host sums an eighth with its peers on the other hosts."""
    within = ring_seconds("all_reduce", LARGE, 8, INSIDE, 50e9)
    between = ring_seconds("all_reduce", LARGE / 8, 4, BETWEEN, 5e9)
    found = collective_seconds("all_reduce", LARGE, RankGroup(32, 8), TOPOLOGY)
    assert found == pytest.approx(3e-6 + within + between)
    assert found < collective_seconds("all_reduce", LARGE, RankGroup(32, 1), TOPOLOGY)


def test_messages() -> None:
    assert message_seconds(1e9, TOPOLOGY, across_hosts=False) == pytest.approx(1e-6 + 1 / 25)
    assert message_seconds(1e9, TOPOLOGY, across_hosts=True) == pytest.approx(5e-6 + 1 / 2.5)


def test_groups_by_their_distance() -> None:
    assert RankGroup.strided(8, 1, 8) == RankGroup(8, 8)
    assert RankGroup.strided(4, 2, 8) == RankGroup(4, 4)
    assert RankGroup.strided(32, 4, 8) == RankGroup(32, 2)
    assert RankGroup.strided(4, 64, 8) == RankGroup(4, 1)
    assert RankGroup(32, 2).num_hosts == 16
    assert collective_seconds("all_reduce", LARGE, RankGroup(1, 1), TOPOLOGY) == 0


@pytest.mark.parametrize("name", catalog.names_of("topologies"))
@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_and_more_hosts_take_longer(name: str, kind: str) -> None:
    topology = catalog.topology(name)
    for group in (RankGroup(4, 4), RankGroup(32, 8), RankGroup(16, 1)):
        by_size = [collective_seconds(kind, 10.0**e, group, topology) for e in range(11)]
        assert all(a < b for a, b in pairwise(by_size))
    for nbytes in (1e3, 1e9):
        by_hosts = [
            collective_seconds(kind, nbytes, RankGroup(h, 1), topology) for h in (2, 4, 8, 64)
        ]
        assert all(a < b for a, b in pairwise(by_hosts))


@pytest.mark.parametrize(
    ("size", "megabytes", "microseconds"),
    [
        (2, 1, 44),
        (2, 64, 405),
        (2, 1024, 5443),
        (4, 16, 180),
        (4, 256, 1929),
        (8, 8, 134),
        (8, 1024, 8193),
    ],
)
def test_nccl_on_a100s(size: int, megabytes: int, microseconds: float) -> None:
    """Published all-reduces of NCCL (vTrain, MICRO 2024), within 15 %."""
    topology = catalog.topology("dgx-a100")
    found = collective_seconds("all_reduce", megabytes * 2**20, RankGroup(size, size), topology)
    assert found == pytest.approx(microseconds * 1e-6, rel=0.15)


def test_other_kinds_are_refused() -> None:
    with pytest.raises(PlanError, match='no cost of a collective "broadcast"'):
        collective_seconds("broadcast", 1.0, RankGroup(2, 2), TOPOLOGY)
