"""Reads the samples of one request and joins them; runs in a worker, or in the process of the loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset, TensorDataset

from tutti.data.collation import Collation, cut
from tutti.data.cursor import Cursor, refuse_stream
from tutti.data.fingerprint import FirstSamples, seen
from tutti.data.rank_rows import is_split, rows
from tutti.data.sample_errors import (
    ReadFailure,
    SampleNames,
    Whereabouts,
    dataset_name,
    failed_collation,
    failed_read,
    worker_number,
)
from tutti.data.sample_order import BatchSpan, Order, SampleNumbers
from tutti.data.sample_seeds import batch_seed, generators_kept, sample_seeds, seed_generators
from tutti.data.sent_batches import no_room, sendable
from tutti.data.token_windows import TokenWindows
from tutti.errors import TuttiError
from tutti.layout import Layout


@dataclass(frozen=True)
class BatchRequest:
    """What one rank reads of one batch.

    `samples` are the rows of this rank; or all rows, of which it keeps those from `first` to `last` once
    they are joined, if it `cuts`. `seeds` are those of the samples, `seed` is that of the batch.
    """

    samples: SampleNumbers
    seeds: Sequence[int]
    seed: int
    bound: int | None = None
    cuts: bool = False
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class Here:
    """The layout that divides batches in this process, and its rank; the seed of the loader."""

    layout: Layout
    rank: int
    seed: int


@dataclass(frozen=True)
class Fingerprint:
    """A request for the first samples, to recognize the dataset."""

    num_samples: int


class Reader:
    """A map-style dataset, or several, as PyTorch's `DataLoader` reads it: one request, one joined batch."""

    def __init__(
        self, datasets: Sequence[Any], collation: Collation, whereabouts: Whereabouts
    ) -> None:
        self.datasets, self.collation, self.whereabouts = datasets, collation, whereabouts
        self.seen: FirstSamples | None = None
        self._draws = [may_draw(x) for x in datasets]

    def check_state(self) -> None:
        """Raise `CheckpointError`: such a dataset has no state."""
        raise refuse_stream(dataset_name(self.datasets[0]))

    def request(self, order: Order, begin: Cursor, span: BatchSpan, here: Here) -> BatchRequest:
        """The request for a batch of the loop that began at a position."""
        epoch, size = begin.epoch, span.stop - span.start
        own = rows(size, here.layout, here.rank)
        cuts = is_split(size, here.layout) and not self.collation.by_rows
        read = range(size) if cuts else own
        start, stop = span.start + read.start, span.start + read.stop
        return BatchRequest(
            order.samples(epoch, start, stop),
            sample_seeds(here.seed, epoch, start, stop),
            batch_seed(here.seed, epoch, span.start),
            bound=span.bound,
            cuts=cuts,
            first=own.start,
            last=own.stop,
        )

    def __getitems__(self, request: BatchRequest | Fingerprint) -> dict[str, Any]:
        """The batch, or the `ReadFailure` to read it; called by `DataLoader` with what its sampler gives."""
        drawn = any(self._draws) or not self.collation.stacks
        with generators_kept() if drawn else nullcontext():
            try:
                if isinstance(request, Fingerprint):
                    return {"found": self._first(request.num_samples)}
                return self._batch(request)
            except TuttiError as error:
                return {"failure": ReadFailure(error, error.__cause__)}  # pyright: ignore[reportArgumentType]
            finally:
                self.whereabouts.idle()

    def _batch(self, request: BatchRequest) -> dict[str, Any]:
        samples = self._read(request)
        wanted = request.samples
        names = SampleNames(len(wanted), lambda i: self._name(wanted, i))
        return joined(self.collation, samples, names, request)

    def _read(self, request: BatchRequest) -> list[Any]:
        wanted = request.samples
        if wanted.datasets is None and _reads_together(self.datasets[0]):
            return self._read_together(request)
        which = wanted.datasets.tolist() if wanted.datasets is not None else [0] * len(wanted)
        return [
            self._sample(k, i, seed)
            for k, i, seed in zip(which, wanted.numbers.tolist(), request.seeds, strict=True)
        ]

    def _sample(self, dataset: int, number: int, seed: int) -> Any:
        self.whereabouts.note(dataset, number)
        if self._draws[dataset]:
            seed_generators(seed)
        try:
            return self.datasets[dataset][number]
        except Exception as error:
            raise failed_read(error, self.name(dataset, number), worker_number()) from error

    def _read_together(self, request: BatchRequest) -> list[Any]:
        """As PyTorch does, by the dataset's own `__getitems__`, seeded by the first sample."""
        numbers = request.samples.numbers.tolist()
        self.whereabouts.note(0, numbers[0])
        seed_generators(request.seeds[0])
        try:
            return list(self.datasets[0].__getitems__(numbers))
        except Exception as error:
            said = f"samples {numbers[0]} to {numbers[-1]} of {dataset_name(self.datasets[0])}"
            raise failed_read(error, said, worker_number()) from error

    def _first(self, num_samples: int) -> FirstSamples:
        """The first samples of each dataset, read twice: those that change tell nothing of it."""
        pairs, seconds = [], 0.0
        for k, dataset in enumerate(self.datasets):
            for i in range(min(num_samples, len(dataset))):
                first = self._sample(k, i, i)
                began = time.perf_counter()
                pairs.append((first, self._sample(k, i, i)))
                seconds += time.perf_counter() - began
        return seen(pairs, seconds / max(len(pairs), 1), stacked=self.collation.stacks)

    def _name(self, samples: SampleNumbers, i: int) -> str:
        dataset = 0 if samples.datasets is None else int(samples.datasets[i])
        return self.name(dataset, int(samples.numbers[i]))

    def name(self, dataset: int, number: int) -> str:
        """The text of a sample in an error."""
        several = dataset if len(self.datasets) > 1 else None
        return f"sample {number} of {dataset_name(self.datasets[dataset], several)}"


def _inner(dataset: Any) -> Any:
    """The dataset of which others are a `Subset`."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _reads_together(dataset: Any) -> bool:
    """Whether a dataset has a `__getitems__` of its own; that of PyTorch's `Subset` hides another's."""
    return hasattr(_inner(dataset), "__getitems__")


def joined(
    collation: Collation, samples: list[Any], names: Sequence[str], request: BatchRequest
) -> dict[str, Any]:
    """The answer with the batch of some samples; `names` are theirs."""
    if not collation.stacks:
        seed_generators(request.seed)
    try:
        batch = collation(samples, names, request.bound)
    except TuttiError:
        raise
    except Exception as error:
        said = _all_of(names, len(samples))
        raise no_room(error, said) or failed_collation(error, said, worker_number()) from error
    marks = None
    if request.cuts:
        batch, marks = cut(batch, len(samples), request.first, request.last)
    return {"batch": sendable(batch, _all_of(names, len(samples))), "marks": marks}


def _all_of(names: Sequence[str], count: int) -> str:
    return names[0] + (f" to {names[count - 1]}" if count > 1 else "")


def may_draw(dataset: Any) -> bool:
    """Whether reading a sample may draw random numbers: not from these, which only hold their samples."""
    return type(_inner(dataset)) not in (list, tuple, TensorDataset, TokenWindows)
