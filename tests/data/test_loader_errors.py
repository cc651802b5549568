"""Mistakes are named before anything starts, and failures by their sample."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tutti
from one_rank import as_rank
from small_datasets import Numbers
from tutti.data import own_reads
from tutti.data.sample_errors import Whereabouts


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


class Unequal(Numbers):
    """Sample 3 is longer than the others."""

    def __getitem__(self, i: int) -> Any:
        return {"tokens": torch.zeros(5 if i == 3 else 4), "length": i}


class Broken(Numbers):
    """Sample 5 raises."""

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 5:
            raise OSError("no such picture")
        return torch.tensor([i])


class Fatal(Numbers):
    """Sample 5 ends its process."""

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([i])


class Slow(Numbers):
    """Sample 5 takes long."""

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(3 * (i == 5))
        return torch.tensor([i])


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        ({"batch_size": 0}, "batch_size=0 is no whole number from 1", "batch_size=1"),
        ({"batch_size": 2.0}, "batch_size=2.0 is no whole number", ""),
        ({"num_workers": -1}, "num_workers=-1 is no whole number", "num_workers=0"),
        ({"seed": 1.5}, "seed=1.5 is no whole number", ""),
        ({"batch_size": 9, "drop_last": True}, "8 samples, fewer than batch_size=9", "batch_size=8"),
        ({"batch_size": 2, "drop_last": True, "layout": "data=4"}, "gives some ranks", "batch_size=4"),
        (
            {"batch_size": 3, "layout": "replica=2 sync=average(every=1)"},
            "does not divide by replica=2",
            "batch_size=4",
        ),
        (
            {"batch_size": 6, "dataset": Numbers(9), "layout": "replica=2 sync=average(every=1)"},
            "the last batch has 3 samples",
            "drop_last=True",
        ),
        ({"collate_rows": True}, "collate_rows=True says something of a collate_fn", "leave"),
        ({"dataset": (i for i in range(3))}, "a generator, has no __len__", "__getitem__"),
        ({"dataset": {1, 2}}, "a set, has no __getitem__", "__getitem__"),
        ({"dataset": []}, "no samples", "one sample"),
        ({"layout": "date=2"}, 'unknown word "date=2"', "data"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(given: dict[str, Any], what: str, fix: str) -> None:
    arguments: Any = {"dataset": Numbers(8)} | given
    with pytest.raises(tutti.TuttiError) as error:
        tutti.loader(**arguments)
    assert what in message(error) and re.search(f"fix .*{re.escape(fix)}", message(error))


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "generator"])
def test_other_orders_are_refused_with_the_reason(name: str) -> None:
    others: Any = {name: None}
    with pytest.raises(TypeError, match=f"takes no {name}: .*shuffle=|takes no generator: .*seed="):
        tutti.loader(Numbers(8), **others)
    with pytest.raises(TypeError, match="unexpected keyword argument 'shufle'"):
        tutti.loader(Numbers(8), shufle=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_unequal_shape(workers: int) -> None:
    with pytest.raises(tutti.TuttiError) as error:
        list(tutti.loader(Unequal(8), 4, num_workers=workers))
    text = message(error)
    assert "sample['tokens'] has shape (4,) in sample 0 of Unequal" in text
    assert "shape (5,) in sample 3 of Unequal" in text and "collate_fn" in text


def test_shapes_that_differ_between_ranks() -> None:
    with as_rank("data=2", 1), pytest.raises(tutti.TuttiError) as error:
        list(tutti.loader(Unequal(4), 2))  # rows 1 and 3, a batch each
    assert "batch['tokens'] has rows of shape (5,)" in message(error)
    assert "from sample 3 of Unequal on" in message(error)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sample_that_raises(workers: int) -> None:
    loader = tutti.loader(Broken(8), 2, num_workers=workers)
    found = []
    with pytest.raises(tutti.TuttiError) as error:
        for batch in loader:
            found += batch.flatten().tolist()
    assert found == [0, 1, 2, 3]
    text = message(error)
    assert text.startswith("cannot read sample 5 of Broken: OSError: no such picture")
    assert 'raise OSError("no such picture")' in text
    cause = error.value.__cause__
    assert cause is not None and "no such picture" in str(cause)
    if workers:
        assert "Traceback (most recent call last)" in str(cause) and "in worker" in text
    else:
        assert isinstance(cause, OSError)
    # an advice that has been followed is none
    assert ("; num_workers=0 raises it in this process" in text) == bool(workers)
    assert loader.state_dict()["sample"] == 4


def test_a_collate_fn_that_raises() -> None:
    with pytest.raises(tutti.TuttiError, match="cannot collate sample 0 of Numbers to sample 1 of"):
        list(tutti.loader(Numbers(4), 2, collate_fn=lambda samples: samples[2]))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_dies(persistent: bool) -> None:
    loader = tutti.loader(Fatal(8), 2, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        with pytest.raises(tutti.TuttiError) as error:
            list(loader)
        assert "a worker of the loader died while it read sample 5 of Fatal" in message(error)
        assert isinstance(error.value.__cause__, RuntimeError)


@pytest.mark.parametrize("dies", [False, True])
def test_a_batch_that_cannot_be_fetched_from_a_dead_worker(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has sent its batch shares its memory on request: its connection breaks first."""
    waits = iter([False, dies])

    @contextmanager
    def told() -> Iterator[None]:
        if next(waits):
            raise RuntimeError("DataLoader worker (pid 7) exited unexpectedly")
        yield

    def source() -> Iterator[Any]:
        raise ConnectionResetError(104, "Connection reset by peer")
        yield

    class Reader:
        whereabouts = Whereabouts(1)
        name = staticmethod(lambda dataset, sample: f"sample {sample}")

    monkeypatch.setattr(own_reads, "told_of_deaths", told)
    monkeypatch.setattr(own_reads, "_DEATH_SECONDS", 0.0)
    reads = own_reads.OwnReads(source(), Reader())
    failed = reads.next()
    assert failed is not None and reads.lost is dies
    with pytest.raises(tutti.TuttiError if dies else ConnectionResetError):
        failed["failure"].throw()


def test_a_worker_that_takes_too_long() -> None:
    with pytest.raises(tutti.TuttiError) as error:
        list(tutti.loader(Slow(8), 2, num_workers=1, timeout=1))
    assert "did not answer in time while it read sample 5 of Slow" in message(error)


class Texts(Numbers):
    def __getitem__(self, i: int) -> Any:
        return torch.tensor(i), f"text {i}"


def test_texts_of_rows_are_refused_and_those_of_whole_batches_are_not() -> None:
    with as_rank("data=2", 1):
        with pytest.raises(tutti.TuttiError, match=r"batch\[1\]\[0\] is a str") as error:
            list(tutti.loader(Texts(4), 4))
        assert "default_collate" in message(error)
        collate = torch.utils.data.default_collate
        (numbers, texts), = tutti.loader(Texts(4), 4, collate_fn=collate)  # fmt: skip
    assert numbers.tolist() == [2, 3] and list(texts) == [f"text {i}" for i in range(4)]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    width = max(int(x) for x in samples) + 1
    return torch.stack([torch.zeros(width).fill_(int(x)) for x in samples])


def test_a_collate_fn_sees_the_whole_batch_unless_it_says_otherwise() -> None:
    with as_rank("data=2", 0):
        (part,) = tutti.loader(Numbers(4), 4, collate_fn=padded)
        assert part.tolist() == [[0.0] * 4, [1.0] * 4]
        (part,) = tutti.loader(Numbers(4), 4, collate_fn=padded, collate_rows=True)
        assert part.tolist() == [[0.0] * 2, [1.0] * 2]
        total = lambda samples: torch.stack(samples).sum()  # noqa: E731
        assert [x.item() for x in tutti.loader(Numbers(4), 4, collate_fn=total)] == [6]
        with pytest.raises(tutti.TuttiError, match="without a row for each sample"):
            list(tutti.loader(Numbers(4), 4, collate_fn=total, collate_rows=True))


def test_two_loops_at_once() -> None:
    loader = tutti.loader(Numbers(6), 2)
    with pytest.raises(tutti.TuttiError, match="one loader for each loop"):
        list(zip(loader, loader, strict=False))


class Shifted(Numbers):
    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i + 1])


class Changing(Numbers):
    """Samples that no seed repeats."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([time.perf_counter_ns()])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"dataset": Numbers(9)}, "a dataset of 8 samples, this one has 9"),
        ({"dataset": Shifted(8)}, "its first samples differ"),
        ({"batch_size": 4}, "batch_size=2, this loader has batch_size=4"),
        ({"seed": 3}, "seed=0, this loader has seed=3"),
        ({"shuffle": True}, "shuffle=False, this loader has shuffle=True"),
        ({"drop_last": True}, "drop_last=False, this loader has drop_last=True"),
    ],
)
def test_a_state_of_another_loader(other: dict[str, Any], what: str) -> None:
    state = tutti.loader(Numbers(8), 2).state_dict()
    arguments: Any = {"dataset": Numbers(8), "batch_size": 2} | other
    loader = tutti.loader(**arguments)
    with pytest.raises(tutti.CheckpointError) as error:
        loader.load_state_dict(state)
    assert what in message(error) and "fix " in message(error)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"sample": 3}, "no batch begins at sample 3"),
        ({"sample": 100}, "no batch begins at sample 100"),
        ({"epoch": -1}, "no count"),
        ({"epoch": "1"}, "no count"),
        ({"format": 2}, "format 2"),
    ],
)
def test_a_state_that_is_damaged(change: dict[str, Any], what: str) -> None:
    loader = tutti.loader(Numbers(8), 2)
    for state in ({}, [], {**loader.state_dict(), **change}):
        with pytest.raises(tutti.CheckpointError) as error:
            loader.load_state_dict(state)  # type: ignore[arg-type]
    assert what in message(error)
    state = loader.state_dict()
    del state["seed"]
    with pytest.raises(tutti.CheckpointError, match='lacks "seed"'):
        loader.load_state_dict(state)


class Endless(Numbers):
    """Samples that hold themselves."""

    def __getitem__(self, i: int) -> list[object]:
        sample: list[object] = [torch.tensor(i)]
        sample.append(sample)
        return sample


def test_samples_that_cannot_be_recognized_are_read_all_the_same() -> None:
    loader = tutti.loader(Endless(4), 2, collate_fn=lambda samples: [int(x[0]) for x in samples])
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == [[0, 1], [2, 3]]


def test_samples_that_change_at_each_read_are_no_other_dataset() -> None:
    state = tutti.loader(Changing(8), 2).state_dict()
    tutti.loader(Changing(8), 2).load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"prefetch_factor": 2}, "prefetch_factor=2 is an option of workers, and num_workers is 0"),
        ({"persistent_workers": True}, "persistent_workers=True is an option of workers"),
        ({"timeout": 5}, "timeout=5 is an option of workers"),
        ({"num_workers": 1, "timeout": -1}, "timeout=-1 is no time"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor=0 is no whole number from 1"),
    ],
)
def test_options_of_workers(given: dict[str, Any], what: str) -> None:
    with pytest.raises(tutti.TuttiError) as error:
        tutti.loader(Numbers(8), 2, **given)
    assert what in message(error)


def test_a_misspelled_argument_has_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="'suffle'; did you mean shuffle"):
        tutti.loader(Numbers(8), 2, suffle=True)


@pytest.mark.parametrize("name", ["sampler", "set_epoch"])
def test_epochs_need_no_sampler(name: str) -> None:
    loader = tutti.loader(Numbers(8), 2, shuffle=True)
    assert loader.batch_size == 2 and not hasattr(loader, name)
    with pytest.raises(AttributeError, match="another permutation each epoch by itself"):
        getattr(loader, name)
