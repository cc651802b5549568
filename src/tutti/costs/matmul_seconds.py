"""The time of a matmul: tiles, waves, caches and memory.

    tiles  =  batch ceil(m / a) ceil(n / b)         each processor computes one tile (a, b) at a time
    waves  =  ceil(tiles / processors)              the last wave may leave processors idle
    tile   =  k max(2 a b / rate, (a + b) bytes / cache)  +  a b bytes / memory      its sums, its writes
    matmul =  the fastest tile size:  max(waves tile, bytes of operands and result / memory)

`rate` and `cache` are one processor's share of what the device reaches, `memory` the share of one of the
tiles of a wave. A long k may be split over several tiles, which then are added up in float32. Source: NVIDIA,
Matrix Multiplication Background User Guide, sections 2.3, 3.1 and 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from tutti.costs.kernels import MatmulShape
from tutti.hardware.accelerator import Device

# Parts of k that tiles compute apart, and the shortest worth it.
_SPLITS = (1, 2, 4, 8)
_SHORTEST_K = 256
# Rows that are a multiple of so many bytes are copied asynchronously: by some kernels (PTX: cp.async takes 4,
# 8 or 16), and by all (PTX: the bulk copies of a Hopper take 16).
_PARTLY_ALIGNED_NBYTES, _ALIGNED_NBYTES = 4, 16
_SUM_NBYTES = 4  # of an element of a partial sum


def matmul_seconds(shape: MatmulShape, device: Device) -> float:
    """Seconds on the device, without its launch.

    Raises:
        PlanError: the device has no peak of the dtype.
    """
    return _seconds(shape, _reached(shape.dtype, device))


@dataclass(frozen=True)
class _Reached:
    """What a device reaches in a dtype: FLOP/s, bytes per second of cache and memory, and the rest."""

    rate: float
    cache: float
    memory: float
    processors: float
    misaligned: float
    partly_aligned: float
    tiles: tuple[tuple[int, int], ...]


def _reached(dtype: torch.dtype, device: Device) -> _Reached:
    return _Reached(
        rate=device.peak_of(dtype) * device.matmul_efficiency.value,
        cache=device.cache_bandwidth.value if device.cache_bandwidth else float("inf"),
        memory=device.bandwidth.value * device.memory_efficiency.value,
        processors=device.processors.value,
        misaligned=device.misaligned.value if device.misaligned else 1.0,
        partly_aligned=device.partly_aligned.value if device.partly_aligned else 1.0,
        tiles=device.tiles,
    )


@lru_cache(maxsize=100_000)
def _seconds(shape: MatmulShape, of: _Reached) -> float:
    itemsize = shape.dtype.itemsize
    best = float("inf")
    for a, b in of.tiles:
        num = shape.batch * -(-shape.m // a) * -(-shape.n // b)
        step = of.processors * max(2.0 * a * b / of.rate, (a + b) * itemsize / of.cache)
        write = min(num, of.processors) * a * b * itemsize / of.memory
        for split in _SPLITS:
            if split > 1 and shape.k < split * _SHORTEST_K:
                continue
            waves = -(-num * split // of.processors)
            adding = split * shape.batch * shape.m * shape.n * _SUM_NBYTES if split > 1 else 0
            best = min(best, waves * (step * shape.k / split + write) + adding / of.memory)
    moved = shape.batch * (shape.m * shape.k + shape.k * shape.n + shape.m * shape.n) * itemsize
    slow = 1.0
    # Other dtypes have no kernels that copy so.
    if itemsize <= 2 and shape.aligned_nbytes < _ALIGNED_NBYTES:
        partly = shape.aligned_nbytes >= _PARTLY_ALIGNED_NBYTES
        slow = of.partly_aligned if partly else of.misaligned
    return max(best, moved / of.memory) * slow
