"""Shows the current call of each rank to the ranks of its host: an entry per call, in shared memory.

    rank 0   call 5 | call 6 | call 7 |          is in call 7
    rank 1   call 5 | call 6 |        |          is in none

A rank writes its own entries, the newest over the oldest, and reads those of the others. It never waits: it
writes, issues a full fence, and then reads. So of two ranks at least the later one sees the other's entry.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tutti.comm.host.life import Life
from tutti.comm.host.segment import Exchange, make_segment
from tutti.comm.host.signals import full_fence

NUM_ENTRIES = 4
NBYTES = 2**15  # size of an entry
TEXT_NBYTES = 2**12
_HEAD = struct.Struct("<QII")  # the call, and how many bytes of text and data there are
_TEXT, _DATA = _HEAD.size, _HEAD.size + TEXT_NBYTES
DATA_NBYTES = NBYTES - _DATA
# Before a rank's entries: its current call, its failed call, the time; then the latest calls of its steps.
_LATEST, NUM_STEPS = 64, 64
_NOW = _LATEST + 8 * NUM_STEPS
_RANK = _NOW + NUM_ENTRIES * NBYTES
_COUNT = (1 << 32) - 1


class Entry(NamedTuple):
    """A rank's entry for one call: a text for people, and bytes for comparison."""

    text: str
    data: bytes


class Board:
    """The entries of a group's ranks; a call is a number that is not 0, the same on all ranks.

    The upper half of a call is the number of its step, the lower one counts: the calls of a step rise.

    Args:
        ranks: the group's ranks in its order.
        position: this rank's index among them.
        pids: the process id of each.
        exchange: all-gathers a text in the group; used only during setup.

    Raises:
        SharedMemoryError: on every rank, where memory cannot be shared.
    """

    def __init__(
        self, ranks: Sequence[int], position: int, pids: Sequence[int], exchange: Exchange
    ) -> None:
        self.ranks, self.position = tuple(ranks), position
        self.others = [j for j in range(len(ranks)) if j != position]
        self._memory = make_segment(len(ranks) * _RANK, position, exchange)
        raw: Any = self._memory.numpy()
        self._raw = memoryview(raw).cast("B")
        self._words = self._raw.cast("Q")
        self._lives = {j: Life.of(pids[j]) for j in self.others}
        self._texts = [b""] * NUM_ENTRIES
        self._turn = 0
        self._slots: dict[int, int] = {}  # the latest call of a step, by its number

    def write(self, call: int, text: bytes, data: bytes) -> None:
        """Enter a call with its arguments."""
        turn = self._turn = (self._turn + 1) % NUM_ENTRIES
        at = self._offset(self.position, turn)
        self._words[at // 8] = 0
        full_fence()
        self._raw[at + _DATA : at + _DATA + len(data)] = data
        if text != self._texts[turn]:  # it seldom changes
            self._texts[turn] = text
            self._raw[at + _TEXT : at + _TEXT + len(text)] = text
        _HEAD.pack_into(self._raw, at, 0, len(text), len(data))
        full_fence()
        self._words[self._slot(call)] = self._words[at // 8] = call
        self._words[self.position * _RANK // 8] = call
        full_fence()

    def leave(self) -> None:
        """Leave the call."""
        self._words[self.position * _RANK // 8] = 0

    def fail(self, call: int) -> None:
        """Leave the call half-way."""
        at = self.position * _RANK // 8
        self._words[at + 1] = call
        full_fence()
        self._words[at + 2] = time.monotonic_ns()

    def failed(self, j: int, since_ns: int) -> int:
        """The call that the rank at position j has left half-way since a time (monotonic), else 0."""
        at = j * _RANK // 8
        return self._words[at + 1] if self._words[at + 2] > since_ns else 0

    def now(self, j: int) -> int:
        """The current call of the rank at position j; 0 if it is in none."""
        return self._words[j * _RANK // 8]

    def has(self, j: int, call: int) -> bool:
        """Whether the rank at position j has reached a call, as far as its entries go back."""
        return self._find(j, call) is not None

    def reached(self, j: int, call: int) -> bool:
        """Whether the rank at position j has reached a call, also long ago; False for a step of long ago."""
        first = (j * _RANK + _LATEST) // 8
        latest = self._words[first : first + NUM_STEPS].tolist()
        step, count = call >> 32, call & _COUNT
        return any(x >> 32 == step and x & _COUNT >= count for x in latest if x)

    def data(self, j: int, call: int) -> bytes | None:
        """The arguments of a call on the rank at position j; None until it has reached the call."""
        at = self._find(j, call)
        if at is None:
            return None
        _, _, length = _HEAD.unpack_from(self._raw, at)
        found = bytes(self._raw[at + _DATA : at + _DATA + length])
        return found if self._words[at // 8] == call else None

    def text(self, j: int, call: int) -> str:
        """The text of the rank at position j for a call; "" where there is none."""
        at = self._find(j, call)
        if at is None:
            return ""
        _, length, _ = _HEAD.unpack_from(self._raw, at)
        return bytes(self._raw[at + _TEXT : at + _TEXT + length]).decode(errors="replace")

    def ended(self, j: int) -> bool:
        """Whether the process of the rank at position j has ended."""
        return self._lives[j].ended()

    def _find(self, j: int, call: int) -> int | None:
        words, first = self._words, j * _RANK + _NOW
        for turn in range(NUM_ENTRIES):
            if words[(first + turn * NBYTES) // 8] == call:
                return first + turn * NBYTES
        return None

    def _slot(self, call: int) -> int:
        """The word of this rank for the latest call of a step; a new step takes the place of the oldest."""
        step = call >> 32
        slot = self._slots.get(step)
        if slot is None:
            slot = len(self._slots)
            if slot == NUM_STEPS:
                slot = self._slots.pop(next(iter(self._slots)))
            self._slots[step] = slot
        return (self.position * _RANK + _LATEST) // 8 + slot

    def _offset(self, j: int, turn: int) -> int:
        return j * _RANK + _NOW + turn * NBYTES
