"""The order of one epoch: its batches, and the sample at each position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tutti.data.permutation import key_of, permuted


@dataclass(frozen=True)
class SampleNumbers:
    """Some samples: their numbers in their datasets, and the datasets; None: there is one."""

    numbers: NDArray[np.int64]
    datasets: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class BatchSpan:
    """A batch: its positions in the epoch, and the bound of its samples' lengths, if they are in buckets."""

    start: int
    stop: int
    bound: int | None = None


class Order(Protocol):
    """A function of the epoch and the position alone: no rank, layout or worker enters."""

    def num_batches(self) -> int:
        """The number of batches of every epoch."""
        ...

    def span(self, epoch: int, position: int) -> BatchSpan | None:
        """The batch that begins at a position; None at the end. Raises `ValueError` within a batch."""
        ...

    def spans(self, epoch: int, position: int) -> Iterator[BatchSpan]:
        """The batches from a position to the end of the epoch; a stream has no known end."""
        while (span := self.span(epoch, position)) is not None:
            yield span
            position = span.stop

    def allows(self, epoch: int, position: int, *, ended: bool) -> bool:
        """Whether a loop may be at a position: a batch begins there, or the epoch has ended."""
        try:
            return (self.span(epoch, position) is None) == ended
        except ValueError:
            return False

    def samples(self, epoch: int, start: int, stop: int) -> SampleNumbers:
        """The samples at some positions."""
        ...

    def odd_sizes(self) -> set[int]:
        """The sizes of batches that are smaller than `batch_size`."""
        ...


def even_span(position: int, size: int, batch_size: int, *, drop_last: bool) -> BatchSpan | None:
    """The batch at a position of an epoch of `size` samples, all batches but the last equally large."""
    if position == size or (drop_last and position + batch_size > size):
        if position not in (size, size - size % batch_size):
            raise ValueError(position)
        return None
    if position % batch_size or not 0 <= position < size:
        raise ValueError(position)
    return BatchSpan(position, min(position + batch_size, size))


class SampleOrder(Order):
    """The samples of one dataset, each once an epoch, in their own order or shuffled anew each epoch."""

    def __init__(
        self, size: int, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.size, self.batch_size = size, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last

    def num_batches(self) -> int:
        whole, rest = divmod(self.size, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def span(self, epoch: int, position: int) -> BatchSpan | None:
        return even_span(position, self.size, self.batch_size, drop_last=self.drop_last)

    def samples(self, epoch: int, start: int, stop: int) -> SampleNumbers:
        positions = np.arange(start, stop, dtype=np.int64)
        return SampleNumbers(
            one_pass(positions, self.size, epoch, shuffle=self.shuffle, seed=self.seed)
        )

    def odd_sizes(self) -> set[int]:
        rest = self.size % self.batch_size
        return {rest} if rest and not self.drop_last else set()


def one_pass(
    positions: NDArray[np.int64],
    size: int,
    number: int,
    *,
    shuffle: bool,
    seed: int,
    dataset: int = 0,
) -> NDArray[np.int64]:
    """The samples at some positions of one pass over a dataset; each pass has a permutation of its own."""
    if not shuffle:
        return positions
    return permuted(positions, size, key_of("order", seed, number, dataset))
