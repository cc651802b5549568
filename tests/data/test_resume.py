"""Stops at any batch, resumed under any layout and number of workers: each sample once, in one order."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tutti
from one_rank import as_rank
from tutti.data.rank_rows import rows
from tutti.layout import Layout

LAYOUTS = [
    "",
    "data=2",
    "data=3",
    "data=2 tensor=2",
    "pipe=2 data=2 micro=2",
    "expert=2 data=2 seq=2",
]


class Squares:
    """Sample i is the square of i; a rank's reads are kept."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> torch.Tensor:
        self.reads.append(i)
        return torch.tensor([i * i])


def joined(parts: dict[int, list[Any]], layout: Layout) -> list[Any]:
    """The global batch from those of all ranks: each row once."""
    found: list[Any] = []
    for rank in range(layout.num_ranks):
        others = {
            a: c for a, c in layout.mesh.coordinates(rank).items() if a not in ("replica", "data")
        }
        if not any(others.values()):
            found += parts[rank]
    return found if len(found) > len(parts[0]) or layout.axes.get("data", 1) == 1 else parts[0]


def batches_of(
    make: Callable[[], tutti.Loader], state: Any, text: str, count: int, size: int
) -> tuple[list[Any], Any]:
    """The next `count` global batches under a layout, over as many epochs, and the state after them."""
    layout = Layout.parse(text)
    by_rank, states = {}, set()
    for rank in range(layout.num_ranks):
        with as_rank(text, rank):
            loader = make()
            if state is not None:
                loader.load_state_dict(json.loads(state))
            taken: list[Any] = []
            while len(taken) < count:
                taken += [b.flatten().tolist() for b in islice(loader, count - len(taken))]
            by_rank[rank] = taken
            states.add(json.dumps(loader.state_dict()))
    assert len(states) == 1
    found = []
    for k in range(count):
        parts = {rank: taken[k] for rank, taken in by_rank.items()}
        split = len({tuple(p) for p in parts.values()}) > 1
        found.append(joined(parts, layout) if split else parts[0])
        whole = len(found[-1])
        for rank, part in parts.items():
            read = rows(whole, layout, rank)
            assert part == found[-1][read.start : read.stop]
    return found, states.pop()


@settings(max_examples=60)
@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 3),
    legs=st.lists(st.tuples(st.integers(1, 7), st.sampled_from(LAYOUTS)), min_size=1, max_size=4),
)
def test_any_stops_and_layouts_give_one_undisturbed_run(
    size: int, batch_size: int, shuffle: bool, drop_last: bool, seed: int, legs: list[Any]
) -> None:
    drop_last = drop_last and 6 <= batch_size <= size

    def make() -> tutti.Loader:
        return tutti.loader(
            Squares(size), batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed
        )

    loader = make()
    expected: list[Any] = []
    while len(expected) < sum(count for count, _ in legs):
        expected += [b.flatten().tolist() for b in loader]
    found, state = [], None
    for count, layout in legs:
        more, state = batches_of(make, state, layout, count, size)
        found += more
    assert found == expected[: len(found)]
    per_epoch = len(loader)
    for first in range(0, len(found) - per_epoch + 1, per_epoch):
        epoch = [x for batch in found[first : first + per_epoch] for x in batch]
        assert len(set(epoch)) == len(epoch)
        assert drop_last or sorted(epoch) == [i * i for i in range(size)]


@pytest.mark.parametrize("workers", [(0, 1, 2), (2, 0, 1), (1, 2, 2)])
def test_the_number_of_workers_may_change(workers: tuple[int, ...]) -> None:
    make = lambda n: tutti.loader(Squares(13), 4, shuffle=True, num_workers=n)  # noqa: E731
    undisturbed = make(0)
    expected = [b.tolist() for _ in range(3) for b in undisturbed]
    found: list[Any] = []
    state = None
    for n, count in zip(workers, (3, 2, 7), strict=True):
        loader = make(n)
        if state is not None:
            loader.load_state_dict(state)
        while count > 0:
            more = [b.tolist() for b in islice(loader, count)]
            found, count = found + more, count - len(more)
        state = json.loads(json.dumps(loader.state_dict()))
    assert found == expected


@pytest.mark.parametrize("text", ["data=2 tensor=2", "pipe=2 data=2 micro=2"])
def test_a_rank_reads_its_rows_only(text: str) -> None:
    layout = Layout.parse(text)
    with as_rank("", 0):
        order = [int(x) for b in tutti.loader(Squares(16), 8, shuffle=True) for x in b.sqrt()]
    for rank in range(layout.num_ranks):
        with as_rank(text, rank):
            data = Squares(16)
            loader = tutti.loader(data, 8, shuffle=True)
            loader.state_dict()
            data.reads.clear()  # the first samples, by which a dataset is recognized
            list(loader)
        own = rows(8, layout, rank)
        assert data.reads == [order[b + i] for b in (0, 8) for i in own]
