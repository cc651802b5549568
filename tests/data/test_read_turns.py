"""Every batch of a loop has one reader, who reads it when the group comes to its round."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from tutti.comm.host.publications import Publications
from tutti.data.read_turns import turns
from tutti.data.sample_order import BatchSpan


class Seat:
    """A group as the turns see it."""

    def __init__(self, size: int, position: int) -> None:
        self.size, self.position = size, position

    def owner(self, turn: int) -> int:
        return turn % self.size


def planned(kinds: list[int], sizes: list[int], rank: int) -> Any:
    """The turns of one rank, in a group of each kind; of kind 0 it reads all for itself."""
    seats: list[Any] = [None, *(Seat(n, rank % n) for n in sizes)]
    spans = [BatchSpan(k, k + 1) for k in range(len(kinds))]
    return list(turns(spans, lambda span: cast(Publications, seats[kinds[span.start]])))


@pytest.mark.parametrize("seed", range(20))
def test_each_batch_is_read_once_in_each_group_and_in_time(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [2, 4]
    kinds = chance.choices([0, 1, 2], [1, 4, 2], k=chance.randrange(1, 40))
    readers: dict[int, list[int]] = {}
    for rank in range(4):
        plan = planned(kinds, sizes, rank)
        assert [turn.span.start for turn in plan] == list(range(len(kinds)))
        for at, turn in enumerate(plan):
            for read in turn.reads:
                readers.setdefault(read.span.start, []).append(rank)
                assert read.own and read.span.start >= at
                # At the first turn of its round.
                size = 1 if read.group is None else read.group.size
                assert read.group is turn.group and turn.number == read.number - read.number % size
    for k, kind in enumerate(kinds):
        assert len(readers[k]) == (4 if kind == 0 else 4 // sizes[kind - 1])


def test_the_batches_of_a_group_are_numbered_alone() -> None:
    plan = planned([1, 2, 1, 0, 1, 2], [2, 4], 1)
    assert [turn.number for turn in plan] == [0, 0, 1, 0, 2, 1]
