"""Sums over several threads, each a worker: what servers form for `server.split.small_sums.SmallSums`."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class Sums:
    """Adds up what several threads give, in the order of their numbers."""

    def __init__(self, num_workers: int) -> None:
        self.barrier = threading.Barrier(num_workers)
        self.given: dict[tuple[str, int], Tensor] = {}

    def of(self, worker: int) -> Any:
        def add(name: str, values: Tensor) -> Tensor:
            assert values.dtype == torch.float64 and values.ndim == 1
            self.given[name, worker] = values
            self.barrier.wait(20)
            return torch.stack([self.given[name, w] for w in range(self.barrier.parties)]).sum(0)

        return add
