"""Freed memory is kept for the next step instead of being given back to the system.

glibc maps large blocks one by one and gives them back when they are freed. A training step then has every
page of its activations and gradients zeroed anew by the system, which takes up to a tenth of the step (1 to
4 us for each 4 kB on virtual machines). A GPU's caching allocator keeps its blocks for the same reason.
"""

from __future__ import annotations

import ctypes
import os
import platform

# "0" leaves the allocator as it is.
KEEP = "TUTTI_KEEP_MEMORY"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, where its allocator is glibc's; returns whether it does.

    The process then holds what it held at its peak. `MALLOC_MMAP_THRESHOLD_` and the like, given by the
    user, are respected.
    """
    given = any(name.startswith("MALLOC_") for name in os.environ)
    if os.environ.get(KEEP) == "0" or given or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _LARGEST))


def give_back_now() -> None:
    """Give back what is free at this moment: what it took to capture a step and to cut its state."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
