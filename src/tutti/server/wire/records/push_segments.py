"""Receive buffers for pushes: a few segments, each of many slabs of one size.

    segment 0   | slab 0 | slab 1 | slab 2 | slab 3 |
    segment 1   | slab 4 | slab 5 | slab 6 | slab 7 |          as many as there were, up to 64 MiB

A slab has room for the largest push. With a directory a segment is a mapped file: the kernel keeps its bytes
after the process ends. Without one it is plain memory.
"""

from __future__ import annotations

import bisect
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tutti.server.wire.records.private import open_private

ALIGNED = 64
SEGMENT_NBYTES = 64 * 2**20
_LEAST_SLABS = 4


@dataclass(eq=False)
class Slab:
    """Room for the parts of one push.

    number: among all slabs.  segment, begin: the location of its bytes.
    used: bytes given out.  waits: handled, but perhaps not applied.
    checks: known checksums of placed parts, by (first byte in the slab, length).
    """

    number: int
    segment: int
    begin: int
    memory: Tensor
    used: int = 0
    waits: bool = False
    checks: dict[tuple[int, int], int] = field(default_factory=dict)

    def note(self, placed: Tensor, check: int) -> None:
        """Note the checksum of received bytes, if they are in the slab."""
        begin = placed.data_ptr() - self.memory.data_ptr()
        if 0 <= begin < len(self.memory):
            self.checks[begin, len(placed)] = check

    def clear(self) -> None:
        """Empty the slab for another push."""
        self.used = 0
        self.checks.clear()

    def place(self, nbytes: int) -> Tensor:
        """Memory for a part.

        Raises:
            MemoryError: the slab is full.
        """
        begin = self.used
        self.used += -(-nbytes // ALIGNED) * ALIGNED
        if self.used > len(self.memory):
            raise MemoryError("a push that is larger than its slab")
        return self.memory[begin : begin + nbytes]


@dataclass(frozen=True, eq=False)
class _Segment:
    """Memory of several slabs, the first of which has the number `first`."""

    memory: Tensor
    mapping: mmap.mmap | None
    first: int


class Segments:
    """All slabs of a server.

    Args:
        directory: for the files `segment-0`, `segment-1`, ...; None: plain memory.
        slab_nbytes: room for the largest push.
    """

    def __init__(self, directory: Path | None, slab_nbytes: int) -> None:
        self.directory = directory
        self.slab_nbytes = max(1, -(-slab_nbytes // ALIGNED)) * ALIGNED
        self.slabs: list[Slab] = []
        self._segments: list[_Segment] = []
        self._starts: list[tuple[int, int]] = []  # address and number of each segment, ascending

    def __len__(self) -> int:
        return len(self._segments)

    def open(self) -> None:
        """Map the files of an earlier process.

        Raises:
            OSError: a file cannot be mapped.
        """
        while self.directory is not None and self._path(len(self)).exists():
            self._add(self._path(len(self)).stat().st_size)

    def grow(self) -> list[Slab]:
        """Add a segment; its slabs.

        Raises:
            OSError: there is no room.
        """
        count = min(max(_LEAST_SLABS, len(self.slabs)), SEGMENT_NBYTES // self.slab_nbytes)
        before = len(self.slabs)
        self._add(max(1, count) * self.slab_nbytes)
        return self.slabs[before:]

    def find(self, x: Tensor) -> tuple[Slab, int] | None:
        """The slab of a tensor, and its first byte in the segment; None if it is in no slab."""
        address = x.data_ptr()
        at = bisect.bisect_right(self._starts, (address, len(self._starts))) - 1
        if at < 0 or not x.numel():
            return None
        start, number = self._starts[at]
        segment, begin = self._segments[number], address - start
        if begin >= len(segment.memory):
            return None
        return self.slabs[segment.first + begin // self.slab_nbytes], begin

    def bytes_at(self, segment: int, begin: int, nbytes: int) -> Tensor:
        """`nbytes` of a segment (uint8, 1-D).

        Raises:
            LookupError: the segment has fewer.
        """
        if not 0 <= segment < len(self) or begin < 0:
            raise LookupError(f"segment-{segment} is missing")
        memory = self._segments[segment].memory
        if begin + nbytes > len(memory):
            raise LookupError(f"segment-{segment} ends before byte {begin + nbytes:,}")
        return memory[begin : begin + nbytes]

    def flush(self, slab: Slab) -> None:
        """Flush a slab's bytes to the disk.

        Raises:
            OSError: the flush fails.
        """
        mapping = self._segments[slab.segment].mapping
        if mapping is not None:
            begin = slab.begin // mmap.PAGESIZE * mmap.PAGESIZE
            mapping.flush(begin, slab.begin + len(slab.memory) - begin)

    def _path(self, number: int) -> Path:
        assert self.directory is not None
        return self.directory / f"segment-{number}"

    def _add(self, nbytes: int) -> None:
        if self.directory is None:
            memory, mapping = torch.empty(nbytes, dtype=torch.uint8), None
        else:
            mapping = _mapped(self._path(len(self)), max(nbytes, 1))
            memory = torch.frombuffer(mapping, dtype=torch.uint8)
        number, first, size = len(self), len(self.slabs), self.slab_nbytes
        self._segments.append(_Segment(memory, mapping, first))
        bisect.insort(self._starts, (memory.data_ptr(), number))
        for k, begin in enumerate(range(0, len(memory) - size + 1, size)):
            self.slabs.append(Slab(first + k, number, begin, memory[begin : begin + size]))


def _mapped(path: Path, nbytes: int) -> mmap.mmap:
    """A file's bytes, mapped, with all disk blocks allocated: a full disk raises an error here."""
    fd = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
