"""Recognizes a dataset by its first samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from tutti.capture.forms import flattened
from tutti.data.read_cost import SampleCost, sample_cost

NUM_SAMPLES = 2  # of each dataset
_MOST_NBYTES = 2**20
_PLAIN = (str, bytes, bool, int, float, complex, type(None))

# The shape of one sample's part of a stacked tensor, and its dtype; None: no tensor.
Row = tuple[tuple[int, ...], str] | None


@dataclass(frozen=True)
class FirstSamples:
    """What the first samples tell: their hash, the leaves of a batch of them, and their cost."""

    digest: str
    rows: tuple[Row, ...] | None
    cost: SampleCost | None = None


def seen(pairs: Sequence[Sequence[Any]], seconds: float, *, stacked: bool) -> FirstSamples:
    """From each of some samples, read twice; one that changes counts without its values.

    `seconds` is the mean time of a second read.
    """
    total = hashlib.blake2b(digest_size=16)
    for one, other in pairs:
        try:
            first, second = _digest(one), _digest(other)
        except Exception:  # of an object of the user, or a tensor without values
            first, second = b"", b"unknown"
        total.update(first if first == second else b"changes")
    rows = _rows(pairs[0][0]) if stacked and pairs else None
    cost = sample_cost(pairs[0][0], seconds, stacked=stacked) if pairs else None
    return FirstSamples(total.hexdigest(), rows, cost)


def row_of(x: Any) -> Row:
    """The part of one sample in a leaf of a batch."""
    return (tuple(x.shape[1:]), str(x.dtype)) if isinstance(x, Tensor) and x.ndim else None


def _rows(sample: Any) -> tuple[Row, ...] | None:
    try:
        return tuple(map(row_of, flattened(default_collate([sample]))[0]))
    except Exception:  # the first batch tells it
        return None


def _digest(sample: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for x in flattened(sample)[0]:
        if isinstance(x, Tensor):
            x = x.detach().cpu()
            found.update(f"{x.dtype} {tuple(x.shape)}".encode())
            if x.layout is torch.strided:
                found.update(_octets(x.contiguous().reshape(-1).view(torch.uint8).numpy()))
        elif isinstance(x, np.ndarray):
            found.update(f"{x.dtype} {x.shape}".encode())
            if not x.dtype.hasobject:
                found.update(_octets(np.ascontiguousarray(x).reshape(-1).view(np.uint8)))
        else:
            said = repr(x) if isinstance(x, _PLAIN) else type(x).__name__
            found.update(said.encode(errors="replace"))
    return found.digest()


def _octets(x: Any) -> bytes:
    return x[:_MOST_NBYTES].tobytes()
