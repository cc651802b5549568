"""Ranks of one host publish values for each other in turns, in shared memory.

A value is a text and bytes. Turn t belongs to the rank at position t % size, and a round is one turn of each:

    round    0        1        2
    rank 0   turn 0   turn 2   turn 4     its boxes 0, 1, 0
    rank 1   turn 1   turn 3   turn 5

A rank publishes its value of a round when it comes to the round, and takes the values of all turns in order.
So at its value of round r + 2 it has taken those of round r + 1, whose ranks had taken round r before: no
rank still reads the box of round r, and nobody waits for a reader.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tutti.comm.host.mailboxes import PAGE
from tutti.comm.host.segment import (
    Exchange,
    SharedMemoryError,
    make_segment,
    map_file,
    new_file,
    tried,
)
from tutti.comm.host.signals import LINE, Signals

_NUM_BOXES = 2
_WORDS = LINE // 8  # 64-bit words of a line
_LEAST_NBYTES = 2**16
# A box's words: its file's inode, descriptor and size; the sizes of the text and of the value.
_INODE, _FD, _SIZE, _TEXT, _NBYTES = range(5)


class Published(NamedTuple):
    """A value in its rank's box; valid until this rank publishes in the round after the next."""

    text: bytes
    memory: Tensor


class Publications:
    """The values of one group's ranks.

    Args:
        ranks: the group's ranks in its order.
        position: this rank's index among them.
        pids: the process id of each.
        exchange: all-gathers a text in the group; used only during setup.
        timeout_seconds: how long a wait lasts at most.
        num_neighbors: how many ranks share the cores of this host; the group's by default.

    Raises:
        SharedMemoryError: on every rank, where memory cannot be shared.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        position: int,
        pids: Sequence[int],
        exchange: Exchange,
        timeout_seconds: float,
        num_neighbors: int = 0,
    ) -> None:
        self.ranks, self.position, self.size, self._pids = tuple(ranks), position, len(ranks), pids
        counters = self.size * LINE
        heads = self.size * (_NUM_BOXES + 1) * LINE
        memory = make_segment(2 * counters + heads, position, exchange)
        about = (ranks, position, pids, timeout_seconds, num_neighbors)
        self._begins = Signals(memory[:counters], *about)
        self._signals = Signals(memory[counters : 2 * counters], *about)
        raw: Any = memory[2 * counters :].numpy()
        self._words = memoryview(raw).cast("B").cast("Q")
        self._boxes = [_Box() for _ in range(_NUM_BOXES)]
        self._seen: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self._base = self._round = 0

    def begin(self, note: int) -> None:
        """Begin at turn 0; all ranks call this together, wherever each has left the turns before.

        Raises:
            PeerDiffers: some have another note.
            PeerLost, PeerLate: a rank does not come.
        """
        # Two words in turn, as in `Signals.meet`: a rank overwrites one after all have read it.
        word = (self._begins.count + 1) % 2
        self._words[self._line(self.position, _NUM_BOXES) + word] = self._signals.count
        self._begins.meet(note)
        counts = [self._words[self._line(j, _NUM_BOXES) + word] for j in range(self.size)]
        self._signals.count = self._base = max(counts)
        self._round = 0

    def owner(self, turn: int) -> int:
        """The position of the rank that publishes in a turn."""
        return turn % self.size

    def publish(self, text: bytes, parts: Sequence[tuple[int, Tensor]] = ()) -> str:
        """Publish this rank's value of the next round; never waits.

        Args:
            text: not empty.
            parts: bytes (uint8, 1-D) and their places in the value's memory.

        Returns:
            "", or the reason why the value does not fit into memory: it is then published as None.
        """
        box, line = self._boxes[self._round % 2], self._line(self.position, self._round % 2)
        nbytes = max((low + x.numel() for low, x in parts), default=0)
        begin = _aligned(len(text))
        _, problem = tried(lambda: box.hold(begin + nbytes), None, begin + nbytes)
        if not problem:
            box.write(text, [(begin + low, x) for low, x in parts])
        words = (box.inode, max(box.fd, 0), box.nbytes, len(text), nbytes)
        for k, word in enumerate(words):
            self._words[line + k] = word
        if problem:
            self._words[line + _TEXT] = 0
        self._round += 1
        self._signals.arrive()
        return problem

    def take(self, turn: int) -> Published | None:
        """The value of another rank's turn, once it is there; None if it did not fit.

        Raises:
            PeerLost, PeerLate: its rank does not publish it.
            SharedMemoryError: this rank cannot map its memory, or its rank has given it back.
        """
        j, number = self.owner(turn), turn // self.size
        self._signals.wait(self._base + number + 1, [j])
        line = self._line(j, number % 2)
        inode, fd, size, length, nbytes = self._words[line : line + _NBYTES + 1].tolist()
        if not length:
            return None
        known = self._seen.get((j, number % 2))
        if known is None or known[0] != inode:
            self._seen.pop((j, number % 2), None)
            theirs = self._pids[j], fd, size, True, inode
            found, problem = tried(lambda: map_file(*theirs), None, size)
            if found is None:
                raise SharedMemoryError(problem)
            known = self._seen[j, number % 2] = inode, found
        begin, memory = _aligned(length), known[1]
        return Published(bytes(memory[:length].numpy()), memory[begin : begin + nbytes])

    def _line(self, j: int, k: int) -> int:
        return (j * (_NUM_BOXES + 1) + k) * _WORDS


class _Box:
    """Memory of this rank for its values; a larger value takes the place of the memory, too."""

    def __init__(self) -> None:
        self.fd, self.nbytes, self.inode = -1, 0, 0
        self._memory: Tensor | None = None

    def hold(self, nbytes: int) -> None:
        """Have room; values of slowly growing sizes take few files. Raises `OSError`."""
        if nbytes <= self.nbytes:
            return
        nbytes = -(-max(nbytes * 5 // 4, _LEAST_NBYTES) // PAGE) * PAGE
        self.close()
        self.fd = new_file(nbytes)
        self._memory = map_file(os.getpid(), self.fd, nbytes, at_once=True)
        self.nbytes, self.inode = nbytes, os.fstat(self.fd).st_ino

    def write(self, text: bytes, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Write a value that it has room for."""
        assert self._memory is not None
        raw: Any = self._memory.numpy()
        memoryview(raw)[: len(text)] = text
        for low, x in parts:
            self._memory[low : low + x.numel()].copy_(x)

    def close(self) -> None:
        """Give the memory back; the others do so when they map its successor, or end."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.nbytes, self._memory = -1, 0, None

    def __del__(self) -> None:
        self.close()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
