"""Keeps freed memory for the next step instead of returning it to the system.

glibc maps large blocks one by one and unmaps them when a program frees them. The system then zeroes every
page of a training step's activations and gradients anew, which takes up to a tenth of the step (1 to 4 us for
each 4 kB on virtual machines). A GPU's caching allocator keeps its blocks for the same reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable

from tutti.environment import KEEP_MEMORY

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1
GROWN = 1.25


def keep_freed_memory() -> bool:
    """Let this process keep freed memory, if its allocator is glibc's; returns whether it does.

    The process then holds its peak memory. The user's `MALLOC_MMAP_THRESHOLD_` and similar variables take
    precedence.
    """
    given = any(name.startswith("MALLOC_") for name in os.environ)
    if not KEEP_MEMORY.read() or given or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _LARGEST))


def give_back_now() -> None:
    """Return the free memory, such as that of a capture or of state before its sharding."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class Fragments:
    """Decides when to return fragmented memory.

    A new program's permanent tensors go into free memory. If too little of a large block remains, the next
    step takes new memory, and the rest of the block is wasted. A return at every new program would have the
    system zero every page anew, which takes half as long as to make the program.
    """

    def __init__(self, give_back: Callable[[], None], resident: Callable[[], float]) -> None:
        self._give_back, self._resident = give_back, resident
        self._held = 0.0  # bytes at the first new program since the last return of memory

    def before_new_program(self) -> bool:
        """Return free memory if the process holds a quarter more than at first; whether it did."""
        now = self._resident()
        if not self._held:
            self._held = now
        if now <= GROWN * self._held:
            return False
        self._give_back()
        self._held = 0.0
        return True


def _resident() -> float:
    """Resident bytes of this process."""
    try:
        with open("/proc/self/statm") as statm:
            return float(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0


FRAGMENTS = Fragments(give_back_now, _resident)  # of this process
