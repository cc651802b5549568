"""Directed edges between ranks: what is sent arrives, in order, and neither end waits without need."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import Ranks
from tutti.comm.collectives.channel import NUM_SLOTS, DistributedChannel, SharedChannel
from tutti.comm.collectives.channels import make_channels
from tutti.comm.collectives.groups import Groups
from tutti.errors import CommError
from ways import GLOO, SHARED, by

EVERY_WAY = pytest.mark.parametrize("way", [GLOO, SHARED])
CAPACITY = 2**14
ALL_EDGES = [(i, j) for i, j in itertools.product(range(4), repeat=2) if i != j]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64)


def channels_by(
    way: str, edges: list[tuple[int, int]], n: int = 4, num_slots: int = NUM_SLOTS
) -> tuple[int, dict[Any, Any]]:
    with by(way):
        groups = Groups({"pipe": n})
        found = make_channels(edges, groups, capacity=CAPACITY, num_slots=num_slots)
    kind = SharedChannel if way == SHARED else DistributedChannel
    assert all(isinstance(channel, kind) for channel in found.values())
    assert set(found) == {edge for edge in edges if groups.rank in edge}
    return groups.rank, found


def message(edge: tuple[int, int], number: int) -> Tensor:
    """The same tensor on both ends: shapes and dtypes in turn, among them empty, 0-dim and large."""
    shapes = [(), (0, 3), (1,), (7, 5), (CAPACITY // 64,), (CAPACITY + 13,), (3, 2 * CAPACITY)]
    chance = random.Random(str((edge, number)))
    shape, dtype = chance.choice(shapes), chance.choice(DTYPES)
    numbers = torch.Generator().manual_seed(chance.randrange(2**31))
    return torch.randint(-100, 100, shape, generator=numbers).to(dtype)


def many_edges(way: str, num_messages: int) -> None:
    rank, channels = channels_by(way, ALL_EDGES)
    chance = random.Random(rank)
    # Who sends and who receives is the same order of (number, edge) on all ranks, so nobody waits in
    # a circle, however large the messages are.
    for number, edge in itertools.product(range(num_messages), ALL_EDGES):
        if rank not in edge:
            continue
        if chance.random() < 0.1:
            time.sleep(chance.random() * 5e-3)
        x = message(edge, number)
        if edge[0] == rank:
            given = x.clone()
            channels[edge].send(given)
            given.fill_(1)  # it may be written again
        else:
            got = channels[edge].recv(x.shape, x.dtype)
            assert got.dtype == x.dtype and torch.equal(got, x), (edge, number)
    for channel in channels.values():
        channel.flush()


@EVERY_WAY
def test_many_edges_at_once(ranks: Ranks, way: str) -> None:
    ranks.run(many_edges, way, 6)


def several_at_once(way: str, numel: int) -> None:
    """A message of six values, larger than the ring, to a receiver that may sleep until the last."""
    rank, channels = channels_by(way, [(0, 1), (2, 3)], 4)
    edge = (0, 1) if rank < 2 else (2, 3)
    for number in range(12):
        x = torch.full((numel,), number, dtype=torch.int64)
        if rank == edge[0]:
            channels[edge].send(x, more=number % 6 < 5)
        else:
            assert torch.equal(channels[edge].recv((numel,), torch.int64), x)
    channels[edge].flush()


@EVERY_WAY
@pytest.mark.parametrize("numel", [1, 100_000, 300_000])
def test_more_values_follow(ranks: Ranks, way: str, numel: int) -> None:
    ranks.run(several_at_once, way, numel)


def both_send_first(way: str, num_messages: int, numel: int, num_slots: int) -> list[Tensor]:
    rank, channels = channels_by(way, [(0, 1), (1, 0)], 2, num_slots)
    there, back = channels[rank, 1 - rank], channels[1 - rank, rank]
    results: list[Tensor] = []
    for _ in range(3):  # the ring is as free as before when all has been taken
        for number in range(num_messages):
            there.send(torch.full((numel,), rank * 100 + number, dtype=torch.int64))
        results += [back.recv((numel,), torch.int64) for _ in range(num_messages)]
    there.flush()
    return results


@EVERY_WAY
@pytest.mark.parametrize(
    ("num_messages", "numel", "num_slots"),
    [
        (8, 1, 8),
        (8, CAPACITY // 64, 8),
        (1, CAPACITY // 8, 8),
        (48, 1, 48),
        (32, CAPACITY // 256, 32),
    ],
)
def test_both_may_send_first_up_to_the_capacity(
    ranks: Ranks, way: str, num_messages: int, numel: int, num_slots: int
) -> None:
    given = (both_send_first, way, num_messages, numel, num_slots)
    for rank, results in enumerate(ranks.run(*given, n=2)):
        wanted = [(1 - rank) * 100 + number for number in range(num_messages)] * 3
        assert [int(x[0]) for x in results] == wanted
        assert all(bool((x == x[0]).all()) and len(x) == numel for x in results)


def overfill(way: str) -> tuple[float, int]:
    """Rank 0 sends far more than the edge holds while rank 1 is away: when it had sent all, or when rank 1
    began to receive (one clock for all processes), and what rank 1 got."""
    rank, channels = channels_by(way, [(0, 1)], 2)
    channel, numel = channels[0, 1], 4 * CAPACITY
    if rank == 0:
        channel.send(torch.ones(numel))
        return time.monotonic(), 0
    time.sleep(0.5)
    began = time.monotonic()
    return began, int(channel.recv((numel,), torch.float32).sum())


def test_beyond_the_capacity_a_send_waits_for_the_receiver(ranks: Ranks) -> None:
    (sent_at, _), (began_at, received) = ranks.run(overfill, SHARED, n=2)
    assert sent_at > began_at and received == 4 * CAPACITY


def mismatched() -> str:
    rank, channels = channels_by(SHARED, [(0, 1)], 2)
    if rank == 0:
        channels[0, 1].send(torch.ones(4))
        return ""
    with pytest.raises(CommError) as error:
        channels[0, 1].recv((2, 2), torch.float32)
    return str(error.value)


def test_another_shape_than_was_sent_is_refused(ranks: Ranks) -> None:
    _, text = ranks.run(mismatched, n=2)
    assert "rank 0" in text and "rank 1 in recv over 0 -> 1 (16 B)" in text


def order_of_many() -> list[int]:
    rank, channels = channels_by(SHARED, [(0, 1)], 2)
    if rank == 0:
        for number in range(5000):
            channels[0, 1].send(torch.tensor(number))
        return []
    return [int(channels[0, 1].recv((), torch.int64)) for _ in range(5000)]


def test_messages_stay_in_order(ranks: Ranks) -> None:
    assert ranks.run(order_of_many, n=2)[1] == list(range(5000))
