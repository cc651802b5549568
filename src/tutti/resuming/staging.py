"""Memory for copies of a rank's share of a save, made once and handed to another process."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.checkpoint.manifest import dtype_name, dtype_of
from tutti.checkpoint.share_plans import Place

_ALIGNED = 64
_MOST_SLACK = 2**20


@dataclass(frozen=True)
class Copy:
    """A copy in the memory: of the part at `place`, contiguous, from byte `begin` on."""

    place: Place
    shape: tuple[int, ...]
    dtype: str
    begin: int

    @property
    def end(self) -> int:
        """The byte after it."""
        return self.begin + torch.Size(self.shape).numel() * dtype_of(self.dtype).itemsize

    def within(self, memory: Tensor) -> Tensor:
        """The part as a view of `memory`, bytes."""
        return memory[self.begin : self.end].view(dtype_of(self.dtype)).view(self.shape)

    def values(self) -> list[Any]:
        """The fields, as JSON keeps them."""
        return [self.place[0], list(self.place[1]), list(self.shape), self.dtype, self.begin]

    @classmethod
    def of(cls, name: str, offsets: list[int], shape: list[int], dtype: str, begin: int) -> Copy:
        """Parse the values."""
        return cls((name, tuple(offsets)), tuple(shape), dtype, begin)


def arranged(parts: Mapping[Place, Tensor], begin: int = 0) -> tuple[list[Copy], int]:
    """Places in the memory for copies of `parts`, from byte `begin` on, and the byte after all of them."""
    found = []
    for place, x in parts.items():
        found.append(Copy(place, tuple(x.shape), dtype_name(x.dtype), begin))
        begin += -(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED
    return found, begin


class Staging:
    """Memory that another process maps by its descriptor `fd`; the kernel frees it with the last of both.

    Its pages are there before the first copy: a copy takes no page faults. Forked children, such as a data
    loader's, do not keep it.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("tutti-save", os.MFD_CLOEXEC)
        self.nbytes = 0
        self._map: mmap.mmap | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        _OPEN.add(self)

    def reserve(self, nbytes: int) -> None:
        """Have at least `nbytes`; what was there is lost if they were fewer. Raises `OSError`."""
        if nbytes <= self.nbytes:
            return
        self._unmap()
        nbytes += min(nbytes // 8, _MOST_SLACK)  # the states of loaders grow a little
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.fd, nbytes)
        self._map = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory, self.nbytes = torch.frombuffer(self._map, dtype=torch.uint8), nbytes

    def copy(self, parts: Sequence[Tensor], copies: Sequence[Copy]) -> None:
        """Copy each part to its place; on return the parts may change again."""
        with torch.no_grad():
            for x, one in zip(parts, copies, strict=True):
                one.within(self._memory).copy_(x)

    def put(self, begin: int, text: bytes) -> None:
        """Write `text` from byte `begin` on."""
        if text:
            raw = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._memory[begin : begin + len(text)] = raw

    def close(self) -> None:
        """Give the memory back, here."""
        _OPEN.discard(self)
        self._unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _unmap(self) -> None:
        self._memory, self.nbytes = torch.empty(0, dtype=torch.uint8), 0
        if self._map is not None:
            self._map.close()
            self._map = None


def _forget() -> None:
    """A forked child has no use for the memory."""
    for one in list(_OPEN):
        one.close()


_OPEN: weakref.WeakSet[Staging] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget)
