"""What a way to train must offer to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from benchmarks.models import Case

NUM_BATCHES = 4


class Contender(Protocol):
    """A model that is built and ready on one rank."""

    def step(self) -> float:
        """One training step on this rank's part of the next batch; its loss on what this rank sees.

        Returns when the new weights are there. The mean of it over the ranks is the loss of the global
        batch.
        """
        ...


@dataclass(frozen=True)
class Place:
    """Which process of how many this one is."""

    rank: int
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train a model.

    Args:
        name: as on the command line and in the tables.
        build: makes a contender; called once on every rank.
        prepare: imports and starts what the way needs, before memory is counted. Raises `Missing` for a
            package that is not installed.
        num_ranks: processes, of one thread each.
        num_cores: cores that all its processes may use together.
        num_shares: the global batch in shares of `Case.per_rank` samples: 2 where two ranks split a
            batch, 1 where they share one.
        devices_per_process: ranks that one process stands for; its memory is divided by them.
        needs_tensor: whether it applies only to models that tensor parallelism can split.
        pipelines: whether it cuts a model into stages, and is raced on the cases for that, alone.
        peer: the way that this one is to be compared with.
    """

    name: str
    build: Callable[[Case, Place], Contender]
    prepare: Callable[[Place], None]
    num_ranks: int = 2
    num_cores: int = 2
    num_shares: int = 2
    devices_per_process: int = 1
    needs_tensor: bool = False
    pipelines: bool = False
    peer: str = ""

    def applies_to(self, case: Case) -> bool:
        """Whether the way can train this model."""
        if self.pipelines != bool(case.in_micro):
            return False
        return bool(case.columns) or not self.needs_tensor


class Missing(Exception):
    """A package that a way needs is not installed."""


class Batches:
    """Batches drawn beforehand, given one after another, again and again.

    `part` of `num_parts` is the part of each that this rank takes.
    """

    def __init__(self, case: Case, num_shares: int, part: int = 0, num_parts: int = 1) -> None:
        whole = [case.batch(i, num_shares) for i in range(NUM_BATCHES)]
        self._batches = [tuple(x.chunk(num_parts)[part] for x in batch) for batch in whole]
        self._next = 0

    def next(self) -> tuple[Tensor, ...]:
        """The next batch."""
        batch = self._batches[self._next % NUM_BATCHES]
        self._next += 1
        return batch

    def all(self) -> list[tuple[Tensor, ...]]:
        """Every batch, in order."""
        return self._batches
