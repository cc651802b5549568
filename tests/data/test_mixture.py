"""Datasets in turn by weights: exact shares at any time, own passes, any resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tutti
from one_rank import assert_one_run
from small_datasets import Numbers
from tutti.data.mixture import LONGEST_PERIOD, Mixture, period_counts, turns


class Tens(Numbers):
    """Sample i of dataset k is (k, i)."""

    def __init__(self, size: int, number: int) -> None:
        super().__init__(size)
        self.number = number

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([self.number, i])


@settings(max_examples=200)
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_counts_never_stray_by_a_sample(counts: list[int]) -> None:
    found = turns(counts)
    period, num = sum(counts), len(counts)
    taken = np.cumsum(np.eye(num)[found.datasets], axis=0)
    shares = np.outer(np.arange(1, period + 1), np.array(counts) / period)
    most = 1 - 1 / max(2, 2 * num - 2)
    assert np.abs(taken - shares).max() <= most + 1e-9 < 1
    assert taken[-1].tolist() == counts
    before = [int((found.datasets[:j] == k).sum()) for j, k in enumerate(found.datasets)]
    assert found.before.tolist() == before


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1], [1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([3, 1], [3, 1]),
        ([0.123, 0.877], [123, 877]),
        ([2, 1e-9 + 1e-6], [LONGEST_PERIOD - 1, 1]),
    ],
)
def test_the_turns_of_a_period(weights: list[float], counts: list[int]) -> None:
    assert period_counts(weights) == counts


def test_other_weights_are_rounded() -> None:
    weights = np.random.default_rng(0).random(6)
    counts = np.array(period_counts(weights.tolist()))
    assert counts.sum() == LONGEST_PERIOD
    assert np.abs(counts / LONGEST_PERIOD - weights / weights.sum()).max() < 1e-4


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_dataset_goes_on_through_its_own_passes(shuffle: bool) -> None:
    sizes = [7, 20, 3]
    data = [Tens(n, k) for k, n in enumerate(sizes)]
    loader = tutti.loader(data, 4, shuffle=shuffle, weights=[0.5, 0.3, 0.2])
    found = [x for _ in range(20) for b in loader for x in b.tolist()]
    assert len(found) == 20 * 30
    for k, size in enumerate(sizes):
        numbers = [i for dataset, i in found if dataset == k]
        passes = [numbers[i : i + size] for i in range(0, len(numbers) - size + 1, size)]
        assert all(sorted(p) == list(range(size)) for p in passes)
        assert len({tuple(p) for p in passes}) > 1 or not shuffle or size < 4
    share = [sum(k == d for d, _ in found) / len(found) for k in range(3)]
    assert share == pytest.approx([0.5, 0.3, 0.2], abs=1 / len(found))


def test_it_takes_no_memory() -> None:
    order = Mixture([10**9, 10**8], [0.9, 0.1], 512, shuffle=True, seed=0, drop_last=False)
    found = order.samples(3, 10**8, 10**8 + 512)
    assert found.datasets is not None and len(found) == 512
    assert found.datasets.sum() == pytest.approx(51, abs=1)
    assert len({*zip(found.datasets.tolist(), found.numbers.tolist(), strict=True)}) == 512


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    legs=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from(["", "data=2", "data=3 tensor=2"])),
        min_size=1,
        max_size=3,
    ),
)
def test_any_stops_and_layouts_give_one_undisturbed_run(
    sizes: list[int],
    batch_size: int,
    drop_last: bool,
    shuffle: bool,
    seed: int,
    legs: list[Any],
) -> None:
    drop_last = drop_last and 3 <= batch_size <= sum(sizes)
    weights = [1 + k / 2 for k in range(len(sizes))]

    def make() -> tutti.Loader:
        data = [Tens(n, k) for k, n in enumerate(sizes)]
        how: Any = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed, "weights": weights}
        return tutti.loader(data, batch_size, **how)

    assert_one_run(make, legs)


def test_workers_read_a_mixture() -> None:
    data = [Tens(5, 0), Tens(9, 1)]
    ours = tutti.loader(data, 4, weights=[1, 2], shuffle=True, num_workers=2)
    theirs = tutti.loader(data, 4, weights=[1, 2], shuffle=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"weights": [1]}, "1 weights for 2 datasets"),
        ({"weights": [1, 0]}, "the weight of dataset 1 is 0"),
        ({"weights": [float("nan"), 1]}, "the weight of dataset 0 is nan"),
        ({"weights": ["1", 1]}, "the weight of dataset 0 is '1'"),
        ({"dataset": Numbers(3)}, "the dataset is a Numbers"),
        ({"dataset": [Numbers(3), Numbers(0)]}, "dataset 1 (Numbers) has no samples"),
        ({"dataset": [Numbers(3), {1}]}, "a set, has no __getitem__"),
        ({"bucket_by_length": [4], "length": [1]}, "do not go together"),
    ],
)
def test_weights_that_do_not_fit(given: dict[str, Any], what: str) -> None:
    arguments: Any = {"dataset": [Numbers(3), Numbers(4)], "weights": [1, 2]} | given
    with pytest.raises(tutti.TuttiError) as error:
        tutti.loader(**arguments)
    assert what in str(error.value) and "fix " in str(error.value)


def test_a_state_of_other_weights() -> None:
    data = [Numbers(3), Numbers(4)]
    state = tutti.loader(data, weights=[1, 2]).state_dict()
    with pytest.raises(tutti.CheckpointError, match=r"weights=\[1.0, 2.0\], this loader has"):
        tutti.loader(data, weights=[1, 3]).load_state_dict(state)
    with pytest.raises(tutti.CheckpointError):
        tutti.loader([Numbers(3), Numbers(5)], weights=[1, 2]).load_state_dict(state)


class Failing(Tens):
    def __getitem__(self, i: int) -> torch.Tensor:
        raise KeyError(i)


def test_a_sample_that_fails_names_its_dataset() -> None:
    with pytest.raises(tutti.TuttiError, match=r"cannot read sample 0 of dataset 1 \(Failing\)"):
        list(tutti.loader([Tens(3, 0), Failing(3, 1)], weights=[1, 1]))
