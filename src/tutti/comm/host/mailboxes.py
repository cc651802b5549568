"""Passes tensors between ranks through slots in shared memory, chunk by chunk.

    rank 0   copy chunk 0 | sync | read chunk 0 | copy chunk 1 | sync | ...
    rank 1   copy chunk 0 | sync | read chunk 0 | copy chunk 1 | sync | ...

Each rank has two mailboxes and uses them in turn. When it writes turn t + 2, all ranks have passed the sync
of turn t + 1, so none still reads turn t. Its third box holds its share of a reduction: the rank writes it
after the sync of a chunk, and the others read it before the sync of the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tutti.comm.host.signals import LINE

# Bytes in mailboxes at once, of all ranks together, and of each at least: they stay in a cache.
_CHUNK_NBYTES, _LEAST_NBYTES = 2**21, 2**16
PAGE = 4096
_NUM_TURNS, _SHARES = 2, 2  # turns 0 and 1, then the boxes for shares
_MOST_VIEWS = 512  # cached views of boxes: making them takes longer than a small copy


def chunk_nbytes(size: int) -> int:
    """The size of a mailbox between `size` ranks: whole pages."""
    return max(_CHUNK_NBYTES // size, _LEAST_NBYTES) // PAGE * PAGE


def num_bytes(size: int) -> int:
    """All mailboxes between `size` ranks."""
    return (_NUM_TURNS + 1) * size * chunk_nbytes(size)


class Mailboxes:
    """The mailboxes of one group.

    Args:
        memory: `num_bytes(size)` shared bytes.
        position: this rank's index in the group.
        size: how many ranks it has.
    """

    def __init__(self, memory: Tensor, position: int, size: int) -> None:
        self.position, self.size, self._nbytes = position, size, chunk_nbytes(size)
        self._memory = memory.view(_NUM_TURNS + 1, size, self._nbytes)
        self._views: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}
        self._turn = 0

    def ranges(self, flat: Tensor, num_parts: int = 1) -> list[tuple[int, int]]:
        """Ranges of which `num_parts` fit a box; one for an empty tensor, so that all ranks sync."""
        size = flat.numel()
        step = self._nbytes // num_parts // LINE * LINE // flat.itemsize
        if size <= step:
            return [(0, size)]
        return [(low, min(low + step, size)) for low in range(0, size, step)]

    def post(self, chunk: Tensor, sync: Callable[[], None]) -> list[Tensor]:
        """Write this rank's chunk; every rank's chunk."""
        boxes = self.take(chunk.dtype, chunk.numel())
        boxes[self.position].copy_(chunk)
        sync()
        return boxes

    def take(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The boxes of the next turn, one for each rank."""
        self._turn ^= 1
        return self._boxes(self._turn, dtype, numel)

    def shares(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The boxes for each rank's share of a reduction."""
        return self._boxes(_SHARES, dtype, numel)

    def _boxes(self, slot: int, dtype: torch.dtype, numel: int) -> list[Tensor]:
        key = (slot, numel, dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            nbytes = numel * dtype.itemsize
            views = tuple(row[:nbytes].view(dtype) for row in self._memory[slot])
            self._views[key] = views
        return list(views)
