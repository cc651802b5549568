"""Shared memory of a worker and a server of one host: payloads go through it, only headers over the socket.

The server makes it, unnamed and sealed in size, so a worker cannot truncate it under the server. The worker
opens it through the server's process, and checks that it contains a random word from the connection: this
proves that both are on one host and that it is the right memory.

    [ word | from worker to server | from server to worker ]

Each half holds the parts of one message, and the next message reuses it: a worker sends its next request only
after the answer.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets

import torch
from torch import Tensor

from tutti.comm.collectives.payload import octets
from tutti.comm.host.segment import directory, map_file
from tutti.server.protocol.messages import Shared
from tutti.server.wire.frames.codec import MalformedError
from tutti.server.wire.frames.frames import Checksum

_WORD_NBYTES = 64
_ALIGNED = 64
_PIECE_NBYTES = 2**18
# Smaller parts go with their headers.
LEAST_NBYTES = 2**16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Half:
    """One direction."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._used = memory, 0

    def begin(self) -> None:
        """Begin the next message, which may overwrite the last one."""
        self._used = 0

    def put(self, pieces: list[Tensor]) -> int | None:
        """Copy tensors here, one after the other; the first offset, or None if they do not go here."""
        nbytes = sum(x.nbytes for x in pieces)
        begin = self._used
        if nbytes < LEAST_NBYTES or begin + nbytes > len(self._memory):
            return None
        at = begin
        for x in pieces:
            self._memory[at : at + x.nbytes].copy_(x.contiguous().view(-1).view(torch.uint8))
            at += x.nbytes
        self._used = -(-at // _ALIGNED) * _ALIGNED
        return begin

    def take(self, begin: int, into: Tensor, *, summed: bool = False) -> int:
        """Copy the other end's bytes; returns their checksum if `summed`, else 0.

        Raises:
            MalformedError: the range is outside of this half.
        """
        if begin + len(into) > len(self._memory):
            raise MalformedError("a part that does not lie in the shared memory")
        source = self._memory[begin : begin + len(into)]
        if not summed:
            into.copy_(source)
            return 0
        found, view, taken = Checksum(), octets(into), 0
        for at in range(0, len(into), _PIECE_NBYTES):  # while it is in the processor's cache
            into[at : at + _PIECE_NBYTES].copy_(source[at : at + _PIECE_NBYTES])
            taken += found.add(view[at : at + _PIECE_NBYTES])
        return found.value(view[taken:], len(into))


class RegionOffer:
    """The server's end, for one connection.

    Raises:
        OSError: there is no memory.
    """

    def __init__(self, nbytes: int) -> None:
        half = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = mmap.PAGESIZE + 2 * half
        self._fd = os.memfd_create("tutti", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)
        except OSError:
            os.close(self._fd)
            raise
        word = secrets.token_bytes(_WORD_NBYTES)
        memory[:_WORD_NBYTES] = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        self.message = Shared(pid=os.getpid(), descriptor=self._fd, nbytes=half, word=word.hex())
        self.incoming, self.outgoing = _halves(memory, half)

    def close(self) -> None:
        """Prevent further opens; existing mappings remain."""
        os.close(self._fd)


def accepted(shared: Shared) -> tuple[Half, Half] | None:
    """The worker's halves, outgoing first; None if this is not the server's host, or mapping fails."""
    size = mmap.PAGESIZE + 2 * shared.nbytes
    try:
        memory = map_file(shared.pid, shared.descriptor, size)
    except (OSError, ValueError):
        return None
    if bytes(memory[:_WORD_NBYTES].tolist()).hex() != shared.word:
        return None
    return _halves(memory, shared.nbytes)


def wanted() -> bool:
    """Whether processes of a host may share memory: `TUTTI_SHARED_MEMORY` is not "off"."""
    return directory() is not None


def _halves(memory: Tensor, nbytes: int) -> tuple[Half, Half]:
    first = memory[mmap.PAGESIZE : mmap.PAGESIZE + nbytes]
    return Half(first), Half(memory[mmap.PAGESIZE + nbytes :])
