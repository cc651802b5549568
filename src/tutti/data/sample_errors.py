"""Errors of samples and workers, with the sample's number, its dataset and the original traceback."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from tutti.data.worker_limits import within_limits
from tutti.errors import TuttiError
from tutti.torch_private.pytrees import tree_flatten
from tutti.user_lines import is_users, quoted

_IDLE = -1


class SampleNames(Sequence[str]):
    """The texts of some samples, each made when an error needs it.

    Args:
        count: of the samples.
        name: the text of one, by its index.
    """

    def __init__(self, count: int, name: Callable[[int], str]) -> None:
        self._count, self._name = count, name

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        return self._name(range(self._count)[i])


class WorkerTraceback(Exception):
    """The cause of an error in a worker process: its traceback there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def dataset_name(dataset: Any, number: int | None = None) -> str:
    """The class of a dataset, with its number among several."""
    name = type(dataset).__name__
    return name if number is None else f"dataset {number} ({name})"


def failed_read(error: Exception, sample: str, where: str) -> TuttiError:
    """The error of a sample that its dataset cannot read."""
    fix = "repair the sample or its dataset"
    if get_worker_info() is not None:
        fix += "; num_workers=0 raises it in this process"
    return _failed(f"cannot read {sample}", error, f"its dataset raised this {where}", fix)


def failed_collation(error: Exception, samples: str, where: str) -> TuttiError:
    """The error of samples that `collate_fn` cannot join."""
    fix = "a collate_fn that takes these samples"
    return _failed(f"cannot collate {samples}", error, f"collate_fn raised this {where}", fix)


def _failed(what: str, error: Exception, why: str, fix: str) -> TuttiError:
    said = f"{type(error).__name__}: {error}"
    return TuttiError(f"{what}: {said}", at=_users_line(error), why=why, fix=fix)


def worker_number() -> str:
    """`in worker 1`, or `in this process`."""
    info = get_worker_info()
    return f"in worker {info.id}" if info else "in this process"


def _users_line(error: Exception) -> str:
    """The innermost line of the user in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if is_users(f.filename)]
    return quoted(f"{users[-1].filename}:{users[-1].lineno}") if users else ""


class ReadFailure:
    """An error on its way from a worker to the process that reads the batch."""

    def __init__(self, error: TuttiError, cause: Exception | None) -> None:
        self.error, self.text, self.cause = error, "", cause
        if cause is not None and get_worker_info() is not None:
            lines = traceback.format_exception(cause)
            self.text, self.cause = "".join(lines), None  # it may not pickle

    def traceback(self) -> str:
        """That of the cause, as text."""
        return self.text or "".join(traceback.format_exception(self.cause) if self.cause else ())

    def throw(self) -> None:
        """Raise the error, with its cause."""
        raise self.error from (WorkerTraceback(self.text) if self.text else self.cause)


class Whereabouts:
    """The sample that each worker is reading, in shared memory, for the report of a worker that dies."""

    def __init__(self, num_workers: int) -> None:
        self._shared = torch.full((num_workers, 3), _IDLE, dtype=torch.int64)
        if num_workers:
            with within_limits():
                self._shared.share_memory_()
        self._row: NDArray[np.int64] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_shared": self._shared, "_row": None}

    def note(self, dataset: int, sample: int) -> None:
        """This worker begins to read a sample."""
        info = get_worker_info()
        if info is None or info.id >= len(self._shared):
            return
        if self._row is None or self._row[0] != os.getpid():
            self._row = self._shared[info.id].numpy()
            self._row[0] = os.getpid()
        self._row[1], self._row[2] = dataset, sample

    def idle(self) -> None:
        """This worker has read its batch."""
        if self._row is not None:
            self._row[2] = _IDLE

    def read_by(self, pids: set[int]) -> list[tuple[int, int]]:
        """Dataset and sample that the processes were reading; those of all workers without a match."""
        busy = [r for r in self._shared.tolist() if r[2] != _IDLE]
        return [(r[1], r[2]) for r in busy if r[0] in pids] or [(r[1], r[2]) for r in busy]


def of_worker(error: Exception) -> bool:
    """Whether PyTorch's `DataLoader` says that a worker died or took too long."""
    text = str(error)
    late = text.startswith("DataLoader timed out")
    return type(error) is RuntimeError and (late or text.startswith("DataLoader worker (pid"))


def lost_worker(error: Exception, whereabouts: Whereabouts, named: Any) -> TuttiError | None:
    """The error of a worker that died or took too long; None for another error.

    `named(dataset, sample)` is the text of a sample.
    """
    text = str(error)
    late = text.startswith("DataLoader timed out")
    if not of_worker(error):
        return None
    pids = {int(x) for part in re.findall(r"pid\D*([\d, ]+)", text) for x in part.split(",")}
    reading = " and ".join(named(*found) for found in whereabouts.read_by(pids))
    during = f" while it read {reading}" if reading else ""
    return TuttiError(
        f"a worker of the loader {'did not answer in time' if late else 'died'}{during}",
        why=text.strip().splitlines()[0],
        fix="a longer timeout="
        if late
        else "read that sample with num_workers=0; killed by signal 9 often means out of memory",
    )


def leaf_names(batch: Any, name: str = "batch") -> Iterator[str]:
    """A name for each leaf, in the order of a flattened batch."""
    if isinstance(batch, dict):
        parts: Iterable[tuple[str, Any]] = ((f"{name}[{k!r}]", x) for k, x in batch.items())
    elif isinstance(batch, list | tuple):
        parts = ((f"{name}[{i}]", x) for i, x in enumerate(batch))
    else:
        leaves = tree_flatten(batch)[0]
        yield from [name] if len(leaves) == 1 else [f"{name}: leaf {i}" for i in range(len(leaves))]
        return
    for inner, x in parts:
        yield from leaf_names(x, inner)


def shape_of(x: Any) -> str:
    """A leaf of a sample in a few words."""
    if isinstance(x, Tensor | np.ndarray):
        return f"shape {tuple(x.shape)}"
    return type(x).__name__
