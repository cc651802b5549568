"""Iterable datasets: the order of the stream on every rank, resumed by its state or by counting."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import tutti
from one_rank import as_rank, assert_one_run, next_batches


class Counted(IterableDataset):
    """The numbers from 0, each with a random one; a stream without a state."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.size):
            yield torch.tensor([i, self.epoch, random.randrange(10**6)])


class Stateful(IterableDataset):
    """The same with a state, which no loop over the loader may take from a later sample."""

    def __init__(self, size: int) -> None:
        self.size, self.next, self.reads, self.epoch = size, 0, 0, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "past": [self.next] * 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["past"] == [state["next"]] * 2
        self.next = state["next"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < self.size:
            self.next += 1
            self.reads += 1
            yield torch.tensor([self.next - 1, self.epoch, random.randrange(10**6)])


KINDS = [Counted, Stateful]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [8, 9, 11])
def test_batches_follow_the_stream(kind: Any, drop_last: bool, size: int) -> None:
    loader = tutti.loader(kind(size), 4, drop_last=drop_last)
    for epoch in range(3):
        found = [x for b in loader for x in b.tolist()]
        assert [x[:2] for x in found] == [
            [i, epoch] for i in range(size - size % 4 if drop_last else size)
        ]
    with pytest.raises(TypeError):
        len(loader)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 20),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    legs=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from(["", "data=2", "data=2 tensor=2", "data=3"])),
        min_size=1,
        max_size=4,
    ),
)
@example(kind=Counted, size=2, batch_size=4, drop_last=False, legs=[(1, "data=2")])
def test_any_stops_and_layouts_give_one_undisturbed_run(
    kind: Any, size: int, batch_size: int, drop_last: bool, legs: list[Any]
) -> None:
    drop_last = drop_last and 3 <= batch_size <= size

    def make() -> tutti.Loader:
        return tutti.loader(kind(size), batch_size, drop_last=drop_last)

    assert_one_run(make, legs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_reads_ahead_and_the_state_does_not(kind: Any, persistent: bool) -> None:
    expected = next_batches(tutti.loader(kind(11), 2), 15)
    found: list[Any] = []
    state = None
    for workers, count in [(1, 2), (0, 3), (1, 4), (1, 6)]:
        again: Any = {"persistent_workers": persistent} if workers else {}
        loader = tutti.loader(kind(11), 2, num_workers=workers, **again)
        if state is not None:
            loader.load_state_dict(state)
        found += next_batches(loader, count - 1)
        found += next_batches(loader, 1)  # a loop of its own
        state = json.loads(json.dumps(loader.state_dict()))
    assert found == expected


def test_a_stream_with_a_state_is_not_read_again() -> None:
    loader = tutti.loader(Stateful(100), 4)
    next_batches(loader, 20)
    data = Stateful(100)
    resumed = tutti.loader(data, 4)
    resumed.load_state_dict(loader.state_dict())
    next_batches(resumed, 2)
    assert data.reads <= 9


def test_the_state_after_the_last_batch_begins_the_next_epoch() -> None:
    for size in (8, 9):
        loader = tutti.loader(Stateful(size), 4)
        states = [loader.state_dict() for _ in loader]
        resumed = tutti.loader(Stateful(size), 4)
        resumed.load_state_dict(states[-1])
        assert resumed.epoch == 1 and next_batches(resumed, 2) == next_batches(loader, 2)


def test_several_workers_count_as_one() -> None:
    with pytest.warns(UserWarning, match="num_workers=3, but one worker reads"):
        loader = tutti.loader(Counted(10), 2, num_workers=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert next_batches(loader, 5) == next_batches(tutti.loader(Counted(10), 2), 5)


class Broken(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(5)
        raise OSError("the line is dead")


class Unequal(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.zeros(3 + i // 2) for i in range(4))


class Unsaved(Stateful):
    def state_dict(self) -> Any:
        return {"next": self.next, "past": [self.next] * 2, "tensor": torch.zeros(1)}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_raises(workers: int) -> None:
    loader = tutti.loader(Broken(), 2, num_workers=workers)
    for _ in range(2):  # the position stays, and the next loop reads again
        with pytest.raises(tutti.TuttiError, match="cannot read sample 5 of Broken: OSError"):
            list(loader)
    assert loader.state_dict()["sample"] == 4


def test_rows_of_other_ranks_have_the_same_shape() -> None:
    with as_rank("data=2", 0), pytest.raises(tutti.TuttiError, match="in sample 2 of Unequal"):
        list(tutti.loader(Unequal(), 4))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"shuffle": True}, "shuffle=True, but Counted is an iterable dataset"),
        ({"layout": "replica=2 sync=average(every=1)"}, "may not divide by replica=2"),
        ({"batch_size": 1, "drop_last": True, "layout": "data=2"}, "gives some ranks"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], what: str) -> None:
    arguments: Any = {"dataset": Counted(8), "batch_size": 2} | given
    with pytest.raises(tutti.TuttiError) as error:
        tutti.loader(**arguments)
    assert what in str(error.value)


def test_streams_that_are_too_short() -> None:
    with pytest.raises(tutti.TuttiError, match="3 samples, fewer than batch_size=4"):
        list(tutti.loader(Counted(3), 4, drop_last=True))
    with pytest.raises(tutti.TuttiError, match="has no samples"):
        list(tutti.loader(Counted(0), 4))
    loader = tutti.loader(Counted(20), 4)
    next_batches(loader, 3)
    for size in (10, 12):
        shorter = tutti.loader(Counted(size), 4)
        shorter.load_state_dict(loader.state_dict())
        with pytest.raises(tutti.CheckpointError, match=f"Counted ended after {size} samples"):
            list(shorter)


def test_states_that_do_not_fit() -> None:
    loader = tutti.loader(Stateful(20), 4)
    next_batches(loader, 1)
    with pytest.raises(tutti.CheckpointError, match=r"of a stream \(Stateful\), this loader reads"):
        tutti.loader(Counted(20), 4).load_state_dict(loader.state_dict())
    unsaved = tutti.loader(Unsaved(20), 4)
    next_batches(unsaved, 1)
    with pytest.raises(tutti.CheckpointError, match="state_dict of Unsaved cannot be saved"):
        unsaved.state_dict()
    state = loader.state_dict() | {"kind": "stream (Counted)"}
    with pytest.raises(tutti.CheckpointError, match="Counted has no load_state_dict"):
        tutti.loader(Counted(20), 4).load_state_dict(state)
