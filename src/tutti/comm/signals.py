"""How ranks of one host wait for each other: counters in shared memory.

Each rank owns one cache line: a counter that only it writes, and a flag by which others say that they
sleep until it changes.

    rank 0   counter 7                  arrived at 7, spins on the others
    rank 1   counter 6, sleepers 1      still computing; will wake rank 0

A wait first spins, which costs nothing where every rank has a core of its own, and then sleeps on a
futex until the counter moves. Between naps it looks whether the process it waits for still lives.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

LINE = 64  # bytes that a rank's counter takes
_COUNTER, _SLEEPERS = 0, 1  # 32-bit words of a line
_MASK, _HALF = 2**32 - 1, 2**31

# How long to spin: longer than ranks in step are apart, shorter than a time slice.
_SPIN_SECONDS = 200e-6
_NAP_SECONDS = 2e-3  # a wake-up can be missed: memory is only ordered enough to make that rare
_LOOK_SECONDS = 0.2  # how often a sleeping rank looks whether its peers live

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)


class PeerLost(RuntimeError):
    """Ranks that are waited for have ended."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__("remote process exited")
        self.ranks = tuple(ranks)


class PeerLate(RuntimeError):
    """Ranks did not come in time."""

    def __init__(self, ranks: Sequence[int], why: str) -> None:
        super().__init__(f"timed out{why}")
        self.ranks = tuple(ranks)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Signals:
    """Counters of one group's ranks.

    Args:
        memory: shared bytes, zeros at first, `LINE` for each rank.
        ranks: the ranks, in the group's order, as errors name them.
        position: this rank's place among them.
        pids: the process id of each.
        timeout_seconds: how long a wait lasts at most.
    """

    def __init__(
        self,
        memory: Tensor,
        ranks: Sequence[int],
        position: int,
        pids: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        self._ranks, self.position, self.size = ranks, position, len(ranks)
        self._memory = memory  # keeps the mapping alive
        raw: Any = memory.numpy()
        self._words = memoryview(raw).cast("I")
        self._address = memory.data_ptr()
        self._lives = [_Life(pid) for pid in pids]
        self._timeout = timeout_seconds
        self._spin = _SPIN_SECONDS if len(os.sched_getaffinity(0)) >= self.size else 0.0
        self._own = position * LINE // 4
        self._others = [j for j in range(self.size) if j != position]
        self.count = 0

    def arrive(self) -> int:
        """Say that this rank is one further; what it wrote before can be seen by who sees this."""
        self.count = (self.count + 1) & _MASK
        _fence()
        self._words[self._own + _COUNTER] = self.count
        if self._words[self._own + _SLEEPERS]:
            self._words[self._own + _SLEEPERS] = 0
            self._futex(self.position, 1, 2**31 - 1, None)
        return self.count

    def wait(self, count: int, positions: Sequence[int] | None = None) -> None:
        """Return when the ranks at `positions` (all others by default) have arrived at `count`.

        Raises:
            PeerLost: one has ended before.
            PeerLate: one has not come within the time-out.
        """
        words = self._words
        for j in self._others if positions is None else positions:
            if (words[j * LINE // 4] - count) & _MASK >= _HALF:
                self._wait_for(j, count)
        _fence()

    def sync(self) -> None:
        """Wait until every rank has arrived as often as this one."""
        self.wait(self.arrive())

    def _behind(self, j: int, count: int) -> bool:
        return (self._words[j * LINE // 4] - count) & _MASK >= _HALF

    def _wait_for(self, j: int, count: int) -> None:
        began = time.monotonic()
        until = began + self._spin
        while time.monotonic() < until:
            for _ in range(50):
                if not self._behind(j, count):
                    return
        look = began + _LOOK_SECONDS
        while True:
            seen = self._words[j * LINE // 4]
            if (seen - count) & _MASK < _HALF:
                return
            self._words[j * LINE // 4 + _SLEEPERS] = 1
            self._futex(j, 0, seen, _NAP_SECONDS)
            now = time.monotonic()
            if now < look:
                continue
            look = now + _LOOK_SECONDS
            ended = [k for k in self._others if self._lives[k].ended()]
            if ended and self._behind(j, count):
                # Whoever lives may itself wait for the one that ended.
                raise PeerLost([self._ranks[k] for k in ended])
            if now - began > self._timeout:
                late = [k for k in self._others if self._behind(k, count)]
                why = "".join(self._lives[k].said() for k in late)
                raise PeerLate([self._ranks[k] for k in late], why)

    def _futex(self, j: int, op: int, value: int, seconds: float | None) -> None:
        """FUTEX_WAIT (0) until rank j's counter is not `value` any more, or FUTEX_WAKE (1)."""
        if _FUTEX is None:
            if seconds:
                time.sleep(seconds / 10)
            return
        span = None if seconds is None else ctypes.byref(_Timespec(0, int(seconds * 1e9)))
        address = ctypes.c_void_p(self._address + j * LINE)
        _libc.syscall(_FUTEX, address, op, ctypes.c_uint32(value), span, None, 0)


class _Life:
    """Whether a process has ended, also when its number is taken again or its parent has not asked."""

    def __init__(self, pid: int) -> None:
        self._pid, self._fd = pid, -1
        self._poll = select.poll()
        try:
            self._fd = os.pidfd_open(pid)
            self._poll.register(self._fd, select.POLLIN)
        except (OSError, AttributeError):
            self._fd = -1

    def ended(self) -> bool:
        if self._fd >= 0:
            return bool(self._poll.poll(0))
        return self._state() in ("", "Z", "X")

    def said(self) -> str:
        """What there is to say of a process that does not come."""
        return f" (process {self._pid} is stopped)" if self._state() in ("T", "t") else ""

    def _state(self) -> str:
        try:
            with open(f"/proc/{self._pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _fence_of_locks() -> None:
    """A full memory fence, of what Python has: a release, then an acquire, of a lock."""
    for _ in range(2):
        _LOCK.acquire()
        _LOCK.release()


_LOCK = threading.Lock()
# x86 keeps stores in order and loads in order, which is all that is asked here.
_fence = (lambda: None) if platform.machine() in ("x86_64", "AMD64") else _fence_of_locks
