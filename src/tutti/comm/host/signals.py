"""Ranks of one host wait for each other: counters in shared memory.

Each rank owns one cache line: a counter that only it writes, a flag that others set when they sleep until
the counter changes, and two notes that identify its current collective.

    rank 0   counter 7                  arrived at 7, spins on the others
    rank 1   counter 6, sleepers 1      still computing; will wake rank 0

A wait first spins, which costs nothing if every rank has a core of its own, and then sleeps on a
futex until the counter changes. Between sleeps it checks that the processes of its group still live.

The waker writes the counter, then reads the flag; the sleeper writes the flag, then the kernel reads the
counter. Both sides have a full fence between (the kernel's own in the system call), so at least one of them
sees the other's write. A wake-up is lost if a rank that sleeps for the next count sets the flag after the
waker reads and before it clears it: the sleeper then wakes at its next check.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tutti.comm.host.awake import AwakeClock
from tutti.comm.host.life import Life

LINE = 64  # bytes that a rank's counter takes
_COUNTER, _SLEEPERS, _NOTES = 0, 1, 2  # 32-bit words of a line; two notes, taken in turn
_WORDS = LINE // 4
_MASK, _HALF = 2**32 - 1, 2**31

# How long to spin: longer than the usual skew between ranks, shorter than a time slice.
_SPIN_SECONDS = 200e-6
_LOOK_SECONDS = 0.2  # how often a sleeping rank checks that its peers live
_POLL_SECONDS = 2e-4  # how long it sleeps where there is no futex

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)


# A waiting rank calls these periodically: one may raise an error.
WATCHES: list[Callable[[], None]] = []


class PeerLost(RuntimeError):
    """Ranks have ended before they arrived."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__("remote process exited")
        self.ranks = tuple(ranks)


class PeerLate(RuntimeError):
    """Ranks did not come in time."""

    def __init__(self, ranks: Sequence[int], why: str) -> None:
        super().__init__(f"timed out{why}")
        self.ranks = tuple(ranks)


class PeerDiffers(RuntimeError):
    """Ranks are in another collective, or in the same one with other tensors."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__("collective, dtype, size or place in an arena differ")
        self.ranks = tuple(ranks)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Signals:
    """Counters of one group's ranks.

    Args:
        memory: shared bytes, zeros at first, `LINE` for each rank.
        ranks: the ranks, in the group's order, as errors name them.
        position: this rank's index among them.
        pids: the process id of each.
        timeout_seconds: how long a wait lasts at most.
        num_neighbors: how many ranks share the cores of this host; the group's by default.
    """

    def __init__(
        self,
        memory: Tensor,
        ranks: Sequence[int],
        position: int,
        pids: Sequence[int],
        timeout_seconds: float,
        num_neighbors: int = 0,
    ) -> None:
        self._ranks, self.position, self.size = ranks, position, len(ranks)
        self._memory = memory  # keeps the mapping alive
        raw: Any = memory.numpy()
        self._words = memoryview(raw).cast("I")
        self._address = memory.data_ptr()
        self._others = [j for j in range(self.size) if j != position]
        self._lives = {j: Life.of(pids[j]) for j in self._others}
        self._timeout = timeout_seconds
        num_busy = max(num_neighbors, self.size)
        self._spin = _SPIN_SECONDS if len(os.sched_getaffinity(0)) >= num_busy else 0.0
        self._own = position * _WORDS
        self._pid = os.getpid()
        self._note = 0
        self.count = 0

    def arrive(self, *, wakes: bool = True) -> int:
        """Increment this rank's counter; a rank that sees the new count sees all earlier writes.

        Without `wakes` ranks that share this one's processor sleep on, until `wake` or a later count.
        """
        if os.getpid() != self._pid:  # it would count for its parent
            raise RuntimeError("a process that a rank has forked cannot join in its collectives")
        self.count = (self.count + 1) & _MASK
        words, own = self._words, self._own
        _fence()
        words[own + _COUNTER] = self.count
        full_fence()
        if wakes or self._spin:
            self.wake()
        return self.count

    def wake(self) -> None:
        """Wake the ranks that sleep until this rank's counter changes."""
        if self._words[self._own + _SLEEPERS]:
            self._words[self._own + _SLEEPERS] = 0
            self._futex(self.position, _WAKE, 2**31 - 1, None)

    def wait(self, count: int, positions: Sequence[int] | None = None) -> None:
        """Return when the ranks at `positions` (all others by default) have arrived at `count`.

        Raises:
            PeerLost: one has ended before.
            PeerLate: one has not arrived within the time-out.
        """
        words = self._words
        for j in self._others if positions is None else positions:
            if (words[j * _WORDS] - count) & _MASK >= _HALF:
                self._wait_for(j, count)
        _fence()

    def sync(self) -> None:
        """Wait until every rank has arrived as often as this one."""
        self.wait(self.arrive())

    def meet(self, note: int) -> None:
        """`sync`, and check that all ranks have the same note.

        Notes go into two words in turn: a rank overwrites a word after it has seen all ranks arrive with
        the next note, so all have compared the old one.

        Raises:
            PeerDiffers: some have another note.
        """
        words = self._words
        self._note ^= 1
        at = _NOTES + self._note
        note &= _MASK
        words[self._own + at] = note
        self.sync()
        for j in self._others:
            if words[j * _WORDS + at] != note:
                different = [k for k in self._others if words[k * _WORDS + at] != note]
                raise PeerDiffers([self._ranks[k] for k in different])

    def late(self, count: int) -> list[int]:
        """The ranks that have not arrived at `count`."""
        return [self._ranks[j] for j in self._others if self._behind(j, count)]

    def _behind(self, j: int, count: int) -> bool:
        return (self._words[j * _WORDS] - count) & _MASK >= _HALF

    def _wait_for(self, j: int, count: int) -> None:
        began = time.monotonic()
        words, at = self._words, j * _WORDS
        while time.monotonic() - began < self._spin:
            for _ in range(50):
                if (words[at] - count) & _MASK < _HALF:
                    return
        look, awake = began + _LOOK_SECONDS, AwakeClock()
        while True:
            seen = words[at]
            if (seen - count) & _MASK < _HALF:
                return
            words[at + _SLEEPERS] = 1
            self._futex(j, _WAIT, seen, _LOOK_SECONDS)
            now = time.monotonic()
            if now >= look:
                look = now + _LOOK_SECONDS
                self._look(j, count, awake.look())

    def _look(self, j: int, count: int, waited_seconds: float) -> None:
        """Raise if rank j, or a rank that j may wait for, will not arrive."""
        for watch in WATCHES:
            watch()
        ended = [k for k in self._others if self._lives[k].ended()]
        # A rank that ended after it had arrived here is no problem.
        ended = [k for k in ended if self._behind(k, count)]
        if ended:
            raise PeerLost([self._ranks[k] for k in ended])
        if waited_seconds > self._timeout and self._behind(j, count):
            late = [k for k in self._others if self._behind(k, count)]
            raise PeerLate(
                [self._ranks[k] for k in late], "".join(self._lives[k].said() for k in late)
            )

    def _futex(self, j: int, op: int, value: int, seconds: float | None) -> None:
        """Sleep until rank j's counter differs from `value`, or wake its sleepers."""
        if _FUTEX is None:
            if op == _WAIT:
                time.sleep(_POLL_SECONDS)
            return
        span = None
        if seconds is not None:
            span = ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
        address = ctypes.c_void_p(self._address + j * LINE)
        _libc.syscall(ctypes.c_long(_FUTEX), address, op, ctypes.c_uint32(value), span, None, 0)


def full_fence() -> None:
    """A full memory fence by means of Python: a release, then an acquire, of a lock."""
    for _ in range(2):
        _LOCK.acquire()
        _LOCK.release()


_LOCK = threading.Lock()
# x86 keeps stores in order and loads in order, which suffices here.
_fence = (lambda: None) if platform.machine() in ("x86_64", "AMD64") else full_fence
