"""A loader on one device: the batches, the order and the position."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

import tutti
from small_datasets import Numbers


class Random(Numbers):
    """Sample i with numbers of three generators."""

    def __getitem__(self, i: int) -> Tensor:
        draws = [random.randrange(10**6), np.random.randint(10**6), torch.randint(10**6, ()).item()]
        return torch.tensor([i, *draws])


def read(loader: tutti.Loader) -> list[list[Any]]:
    """One epoch."""
    return [batch.tolist() for batch in loader]


def flat(epoch: list[list[Any]]) -> list[Any]:
    return [x for batch in epoch for x in batch]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [7, 8, 12])
def test_in_order_it_gives_what_pytorch_gives(size: int, drop_last: bool) -> None:
    data = TensorDataset(torch.randn(size, 3), torch.arange(size))
    loader = tutti.loader(data, 4, drop_last=drop_last)
    theirs = list(DataLoader(data, 4, drop_last=drop_last))
    ours = list(loader)
    assert len(loader) == len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other) and all(map(torch.equal, one, other))


def test_every_epoch_has_an_order_of_its_own_and_every_sample_once() -> None:
    loader = tutti.loader(Numbers(23), 4, shuffle=True)
    epochs = [flat(read(loader)) for _ in range(3)]
    assert all(sorted(e) == [[i] for i in range(23)] for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    other = tutti.loader(Numbers(23), 4, shuffle=True, seed=1)
    assert flat(read(other)) != epochs[0]
    again = tutti.loader(Numbers(23), 4, shuffle=True)
    assert flat(read(again)) == epochs[0]


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 1}, {"num_workers": 2, "prefetch_factor": 4}]
)
def test_neither_order_nor_random_numbers_depend_on_workers(workers: dict[str, Any]) -> None:
    expected = tutti.loader(Random(17), 5, shuffle=True)
    loader = tutti.loader(Random(17), 5, shuffle=True, **workers)
    assert [read(loader), read(loader)] == [read(expected), read(expected)]


def test_random_numbers_change_with_the_epoch_and_the_seed() -> None:
    loader = tutti.loader(Random(4), 4)
    one, two = read(loader), read(loader)
    three = read(tutti.loader(Random(4), 4, seed=1))
    drawn = [x[1:] for x in flat(one) + flat(two) + flat(three)]
    assert all(len({d[k] for d in drawn}) > 10 for k in range(3))


def test_a_subset_is_seeded_sample_by_sample() -> None:
    data: Any = Random(6)
    subset = Subset(data, list(range(6)))
    assert read(tutti.loader(subset, 6)) == read(tutti.loader(data, 6))


def seed_all() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def draws() -> tuple[float, ...]:
    return random.random(), np.random.random(), torch.rand(()).item()


def test_the_generators_of_this_process_are_not_touched() -> None:
    seed_all()
    expected = draws()
    for workers in (0, 1):
        seed_all()
        loader = tutti.loader(Random(6), 2, shuffle=True, num_workers=workers)
        loader.state_dict()
        read(loader)
        assert draws() == expected


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_loop_that_is_left_goes_on(workers: int, persistent: bool) -> None:
    made: Callable[[], tutti.Loader] = lambda: tutti.loader(  # noqa: E731
        Numbers(10), 3, shuffle=True, num_workers=workers, persistent_workers=persistent
    )
    undisturbed, loader = made(), made()
    expected = read(undisturbed) + read(undisturbed) + read(undisturbed)
    found = [b.tolist() for b in islice(loader, 3)]
    found += [b.tolist() for b in islice(loader, 1)]  # the last of the epoch
    found += [b.tolist() for b in islice(loader, 4)]
    assert loader.epoch == 1
    found += read(loader)
    assert found == expected and loader.epoch == 3


def test_the_state_is_plain_and_counts_what_was_handed_out() -> None:
    loader = tutti.loader(Numbers(10), 3, shuffle=True, num_workers=2, prefetch_factor=3)
    it = iter(loader)
    next(it)
    next(it)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [b.tolist() for b in it]
    resumed = tutti.loader(Numbers(10), 3, shuffle=True)
    resumed.load_state_dict(state)
    assert state["sample"] == 6 and read(resumed) == rest


def test_the_state_after_the_last_batch_begins_the_next_epoch() -> None:
    loader = tutti.loader(Numbers(10), 3, shuffle=True)
    states = []
    for _ in loader:
        states.append(loader.state_dict())
    assert [s["epoch"] for s in states] == [0, 0, 0, 0] and loader.epoch == 1
    second = read(loader)
    resumed = tutti.loader(Numbers(10), 3, shuffle=True)
    resumed.load_state_dict(states[-1])
    assert resumed.epoch == 1 and read(resumed) == second


def test_collate_fn_gets_the_samples() -> None:
    loader = tutti.loader(Numbers(5), 2, collate_fn=lambda samples: [int(x) for x in samples])
    assert list(loader) == [[0, 1], [2, 3], [4]]


def test_a_billion_samples_are_shuffled_at_once() -> None:
    loader = tutti.loader(Numbers(10**9), 64, shuffle=True)
    batches = [b.flatten().tolist() for b in islice(loader, 3)]
    assert len({x for b in batches for x in b}) == 192


def test_a_loader_that_a_program_drops_is_freed_at_once() -> None:
    """In a loop or after it: its workers would live until a collection, and delay the end of the process."""
    gc.disable()
    try:
        for num_batches in (1, 3):
            loader = tutti.loader(list(range(12)), batch_size=4)
            loop, dropped = iter(loader), weakref.ref(loader)
            for _ in range(num_batches):
                next(loop)
            del loop, loader
            assert dropped() is None
    finally:
        gc.enable()
