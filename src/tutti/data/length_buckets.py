"""Batches of samples of about one length: each batch is of one bucket, so there are few shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.data.sample_order import BatchSpan, Order, SampleNumbers, one_pass
from tutti.errors import TuttiError


class LengthBuckets(Order):
    """The samples in their order, each batch from one bucket.

    A batch is complete with the last of its samples in that order. What is left in each bucket at the end of
    an epoch makes the last batches, unless `drop_last`. The order of one epoch is in memory.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        bounds: Sequence[int],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        self.bounds, self.batch_size = list(bounds), batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._buckets = np.searchsorted(np.array(self.bounds), lengths).astype(np.int32)
        self._counts = np.bincount(self._buckets, minlength=len(self.bounds))
        self._plan = lru_cache(maxsize=1)(self._planned)

    def num_batches(self) -> int:
        whole = self._counts // self.batch_size
        rest = 0 if self.drop_last else (self._counts % self.batch_size > 0).sum()
        return int(whole.sum() + rest)

    def span(self, epoch: int, position: int) -> BatchSpan | None:
        _, starts, bounds = self._plan(epoch)
        i = int(np.searchsorted(starts, position))
        if i == len(starts) or starts[i] != position:
            raise ValueError(position)
        if i == len(bounds):
            return None
        return BatchSpan(position, int(starts[i + 1]), bounds[i])

    def samples(self, epoch: int, start: int, stop: int) -> SampleNumbers:
        return SampleNumbers(self._plan(epoch)[0][start:stop])

    def odd_sizes(self) -> set[int]:
        rest = self._counts % self.batch_size
        return set() if self.drop_last else {int(x) for x in rest if x}

    def _planned(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
        """The samples in the order of batches; where each batch begins, and the end; the bound of each."""
        size = len(self._buckets)
        order = one_pass(np.arange(size), size, epoch, shuffle=self.shuffle, seed=self.seed)
        buckets = self._buckets[order]
        batches = []  # when it is complete, its bucket, its positions in `order`
        for bucket in range(len(self.bounds)):
            inside = np.flatnonzero(buckets == bucket)
            for i in range(0, len(inside), self.batch_size):
                part = inside[i : i + self.batch_size]
                if len(part) == self.batch_size:
                    batches.append((int(part[-1]), bucket, part))
                elif not self.drop_last:
                    batches.append((size + bucket, bucket, part))
        batches.sort(key=lambda batch: batch[0])
        starts = np.cumsum([0, *(len(part) for _, _, part in batches)])
        samples = order[np.concatenate([part for _, _, part in batches])]
        return samples, starts, [self.bounds[bucket] for _, bucket, _ in batches]


def checked_bounds(bounds: Any) -> list[int]:
    """The bounds of buckets, increasing; raises `TuttiError` for others."""
    found = list(bounds)
    if not found or any(type(b) is not int or b < 1 for b in found) or found != sorted(set(found)):
        raise TuttiError(
            f"bucket_by_length={found!r} are no bounds of lengths",
            why="a bucket holds the samples up to its bound, and above the bound before it",
            fix="increasing whole numbers: bucket_by_length=[64, 128, 256]",
        )
    return found


def lengths_of(
    length: Callable[[int], int] | Sequence[int] | None, size: int, bounds: Sequence[int]
) -> NDArray[np.int64]:
    """The length of every sample; raises `TuttiError` for one above the last bound."""
    if length is None:
        raise TuttiError(
            "bucket_by_length= needs the length of every sample",
            fix="length=, a function of the sample's number or a sequence",
        )
    if callable(length):
        found = np.fromiter((length(i) for i in range(size)), np.int64, size)
    else:
        found = np.asarray(length, dtype=np.int64)
    if found.shape != (size,):
        raise TuttiError(
            f"length= has {len(found)} entries, but the dataset has {size} samples",
            fix="one length for each sample",
        )
    long = np.flatnonzero(found > bounds[-1])
    if long.size:
        i = int(long[0])
        raise TuttiError(
            f"sample {i} has length {found[i]}, above the last bound {bounds[-1]}",
            why=f"{long.size} of {size} samples fit no bucket",
            fix=f"a last bound of {found.max()} or more, or shorter samples",
        )
    return found
