"""Reads an iterable dataset: every rank all of it, of which it keeps its rows."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti.data.collation import Collation, refuse_unequal
from tutti.data.cursor import Cursor, refuse_stream
from tutti.data.fingerprint import FirstSamples
from tutti.data.rank_rows import is_split, rows
from tutti.data.reading import BatchRequest, Here, joined
from tutti.data.sample_errors import (
    ReadFailure,
    SampleNames,
    Whereabouts,
    dataset_name,
    failed_read,
    worker_number,
)
from tutti.data.sample_order import BatchSpan, Order, SampleNumbers
from tutti.data.sample_seeds import batch_seed, generators_kept, sample_seeds, seed_generators
from tutti.errors import CheckpointError, TuttiError

_NO_SAMPLES = SampleNumbers(np.empty(0, np.int64))


class StreamOrder(Order):
    """Batches of samples in the order of a stream, which alone knows its end."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def num_batches(self) -> int:
        raise TypeError("a loader of an iterable dataset has no length")

    def span(self, epoch: int, position: int) -> BatchSpan | None:
        if position % self.batch_size:
            raise ValueError(position)
        return BatchSpan(position, position + self.batch_size)

    def allows(self, epoch: int, position: int, *, ended: bool) -> bool:
        return ended or position % self.batch_size == 0

    def samples(self, epoch: int, start: int, stop: int) -> SampleNumbers:
        return _NO_SAMPLES

    def odd_sizes(self) -> set[int]:
        return set()


@dataclass(frozen=True)
class StreamRequest:
    """The next batch of a stream; the first one of a loop `begins` at its position, from `state` if known."""

    epoch: int
    start: int
    here: Here
    begins: bool
    state: Any


class StreamReader:
    """A stream as PyTorch's `DataLoader` reads it by requests; one process reads it.

    It reads ahead: one sample, or a batch with `drop_last`, so that a batch tells whether it is the last.
    """

    def __init__(
        self,
        stream: Any,
        collation: Collation,
        whereabouts: Whereabouts,
        *,
        batch_size: int,
        drop_last: bool,
    ) -> None:
        self.datasets, self.collation, self.whereabouts = [stream], collation, whereabouts
        self.batch_size = batch_size
        self.ahead = batch_size if drop_last else 1
        self.seen = FirstSamples("", None)  # a read would move the stream
        self._stream = _Stream(stream, self, batch_size)

    def request(self, order: Order, begin: Cursor, span: BatchSpan, here: Here) -> StreamRequest:
        """The request for a batch of the loop that began at a position."""
        begins = span.start == begin.sample
        state = begin.stream if begins else None
        return StreamRequest(begin.epoch, span.start, here, begins, state)

    def check_state(self) -> None:
        """Raise `CheckpointError` if the stream cannot take over a state."""
        if not self._stream.has_state:
            raise refuse_stream(dataset_name(self.datasets[0]))

    def name(self, dataset: int, number: int) -> str:
        """The text of a sample in an error."""
        return f"sample {number} of {dataset_name(self.datasets[dataset])}"

    def __getitems__(self, request: StreamRequest) -> dict[str, Any]:
        """The batch with its size, its end and the stream's state after it; or the `ReadFailure`."""
        with generators_kept():
            try:
                return self._batch(request)
            except TuttiError as error:
                cause: Any = error.__cause__
                return {"failure": ReadFailure(error, cause)}
            finally:
                self.whereabouts.idle()

    def _batch(self, request: StreamRequest) -> dict[str, Any]:
        here, stream = request.here, self._stream
        if request.begins:
            stream.begin(request)
        samples, state = stream.take(self.batch_size, self.ahead)
        size = len(samples)
        if size < self.ahead:
            if request.begins:
                raise _too_short(
                    dataset_name(self.datasets[0]), request.start, size, self.batch_size
                )
            return {}  # a request that was sent before the last answer came
        own = rows(size, here.layout, here.rank)
        by_rows = is_split(size, here.layout) and self.collation.by_rows
        cuts = is_split(size, here.layout) and not by_rows
        names = SampleNames(size, lambda i: self.name(0, request.start + i))
        if by_rows:
            if self.collation.stacks:  # rows of the other ranks have the same shape
                refuse_unequal(samples, names)
            samples = samples[own.start : own.stop]
            names = SampleNames(len(own), lambda i: self.name(0, request.start + own[i]))
        seed = batch_seed(here.seed, request.epoch, request.start)
        about = BatchRequest(_NO_SAMPLES, (), seed, cuts=cuts, first=own.start, last=own.stop)
        answer = joined(self.collation, samples, names, about)
        ended = stream.ended(self.ahead)
        return answer | {"size": size, "ended": ended, "stream": None if ended else state}


class _Stream:
    """The iterator of a stream: what it read ahead, and its states where batches end."""

    def __init__(self, stream: Any, reader: StreamReader, batch_size: int) -> None:
        self.stream, self.reader, self.batch_size = stream, reader, batch_size
        self.has_state = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
        self._initial: list[Any] = []
        self._source: Iterator[Any] | None = None
        self._samples: deque[Any] = deque()
        self._states: deque[Any] = deque()
        self._seeds: list[int] = []
        self._read = 0

    def begin(self, request: StreamRequest) -> None:
        """Go to a position of an epoch: by the stream's state there, else by counting."""
        self._request, self._done = request, False
        self._samples.clear()
        self._states.clear()
        self._seeds, self._read = [], 0
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(request.epoch)
        if self.has_state:
            self._go_to(request.state)
        self._source = self._iterated()
        if self.has_state and request.state is not None:
            self._read = request.start
        while self._read < request.start and not self._done:
            self._pull()
            self._samples.clear()
            self._states.clear()
        if self._read < request.start:
            raise _shorter(dataset_name(self.stream), self._read, request.start)

    def _go_to(self, state: Any) -> None:
        """To a state; None: to that which the stream had at first, in every epoch."""
        if not self._initial:
            self._initial.append(self._state())
        elif state is None:
            state = self._initial[0]
        if state is not None:
            self.stream.load_state_dict(copy.deepcopy(state))

    def take(self, count: int, ahead: int) -> tuple[list[Any], Any]:
        """The next samples and the state after them; then `ended` tells whether others follow."""
        self._fill(count)
        samples = [self._samples.popleft() for _ in range(min(count, len(self._samples)))]
        state = self._states.popleft() if len(samples) == count and self.has_state else None
        self._fill(ahead)
        return samples, state

    def ended(self, ahead: int) -> bool:
        """Whether no batch follows."""
        return len(self._samples) < ahead

    def _fill(self, count: int) -> None:
        while len(self._samples) < count and not self._done:
            self._pull()

    def _pull(self) -> None:
        """Read one sample, with its own seed."""
        place = self._read % self.batch_size
        if not place or not self._seeds:
            first, seed = self._read - place, self._request.here.seed
            self._seeds = sample_seeds(seed, self._request.epoch, first, first + self.batch_size)
        self.reader.whereabouts.note(0, self._read)
        seed_generators(self._seeds[place])
        assert self._source is not None
        try:
            self._samples.append(next(self._source))
        except StopIteration:
            self._done = True
            return
        except Exception as error:
            raise failed_read(error, self.reader.name(0, self._read), worker_number()) from error
        self._read += 1
        if self.has_state and self._read % self.batch_size == 0:
            self._states.append(self._state())

    def _iterated(self) -> Iterator[Any]:
        try:
            return iter(self.stream)
        except Exception as error:
            raise failed_read(error, self.reader.name(0, 0), worker_number()) from error

    def _state(self) -> Any:
        return copy.deepcopy(self.stream.state_dict())


def _shorter(name: str, size: int, start: int) -> CheckpointError:
    return CheckpointError(
        f"{name} ended after {size} samples",
        why=f"the state is one after {start} samples of it, and a batch follows",
        fix="the dataset of the run that is resumed",
    )


def _too_short(name: str, start: int, size: int, batch_size: int) -> TuttiError:
    if start:
        return _shorter(name, start + size, start)
    return TuttiError(
        f"{name} has {size} samples, fewer than batch_size={batch_size}"
        if size
        else f"{name} has no samples",
        why="drop_last=True leaves out a batch that is not full, so there is none" if size else "",
        fix=f"batch_size={size} or less, or drop_last=False"
        if size
        else "a stream of one at least",
    )
