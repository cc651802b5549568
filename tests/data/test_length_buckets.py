"""Batches of one bucket of lengths: every sample once, few shapes, any resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tutti
from one_rank import as_rank, assert_one_run
from small_datasets import Numbers

BOUNDS = [4, 8, 12]


class Texts(Numbers):
    """Sample i has i % 12 + 1 entries i."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((i % 12 + 1,), i)


def size_of(i: int) -> int:
    return i % 12 + 1


def padded(samples: list[torch.Tensor], length: int) -> torch.Tensor:
    return torch.stack(
        [torch.nn.functional.pad(x, (0, length - len(x)), value=-1) for x in samples]
    )


def make(size: int, batch_size: int = 4, **given: Any) -> tutti.Loader:
    how: Any = {"collate_fn": padded, "bucket_by_length": BOUNDS, "length": size_of} | given
    return tutti.loader(Texts(size), batch_size, **how)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [1, 12, 50, 144])
def test_every_sample_is_once_in_a_batch_of_its_bucket(size: int, shuffle: bool) -> None:
    loader = make(size, shuffle=shuffle)
    epochs = []
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader)
        assert {b.shape[1] for b in batches} <= {*BOUNDS}
        for b in batches:
            assert all(b.shape[1] == next(x for x in BOUNDS if x >= size_of(i)) for i in b[:, 0])
        epochs.append([int(i) for b in batches for i in b[:, 0]])
        assert sorted(epochs[-1]) == list(range(size))
        partial = [len(b) < 4 for b in batches]
        assert partial == sorted(partial)  # the rests come last
    assert (epochs[0] != epochs[1]) == (shuffle and size > 1)


def test_drop_last_leaves_out_the_rests() -> None:
    loader = make(50, drop_last=True, shuffle=True)
    batches = list(loader)
    assert len(batches) == len(loader) and all(len(b) == 4 for b in batches)


@settings(max_examples=40)
@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 6),
    shuffle=st.booleans(),
    whole=st.booleans(),
    legs=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from(["", "data=2", "data=3 tensor=2"])),
        min_size=1,
        max_size=3,
    ),
)
def test_any_stops_and_layouts_give_one_undisturbed_run(
    size: int, batch_size: int, shuffle: bool, whole: bool, legs: list[Any]
) -> None:
    def made() -> tutti.Loader:
        return make(size, batch_size, shuffle=shuffle, collate_rows=not whole)

    assert_one_run(made, legs)


def test_lengths_may_be_a_sequence_and_collate_fn_need_not_take_a_bound() -> None:
    lengths = [size_of(i) for i in range(30)]
    loader = make(30, length=torch.tensor(lengths), collate_fn=list)
    assert sorted(int(x[0]) for b in loader for x in b) == list(range(30))


def test_workers_read_buckets() -> None:
    ours, theirs = make(30, shuffle=True, num_workers=2), make(30, shuffle=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_collate_fn_every_rank_sees_unequal_samples() -> None:
    with as_rank("data=2", 0), pytest.raises(tutti.TuttiError, match="samples of a batch differ"):
        list(make(12, collate_fn=None))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"length": None}, "needs the length of every sample"),
        ({"bucket_by_length": None}, "length= is that of buckets"),
        ({"bucket_by_length": []}, "are no bounds"),
        ({"bucket_by_length": [8, 4]}, "are no bounds"),
        ({"bucket_by_length": [4, 4.5]}, "are no bounds"),
        ({"bucket_by_length": [4, 8]}, "sample 8 has length 9, above the last bound 8"),
        ({"length": [1, 2]}, "length= has 2 entries, but the dataset has 30 samples"),
        ({"size": 29, "layout": "replica=2 sync=average(every=1)"}, "do not divide by replica=2"),
        ({"batch_size": 20, "drop_last": True}, "no bucket has batch_size=20 samples"),
    ],
)
def test_buckets_that_do_not_fit(given: dict[str, Any], what: str) -> None:
    with pytest.raises(tutti.TuttiError) as error:
        make(**({"size": 30} | given))
    assert what in str(error.value) and "fix " in str(error.value)
