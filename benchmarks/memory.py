"""How much memory a process has of its own.

The resident size counts memory that ranks share once for each of them, and counts libraries. Here a page
counts by its share: one that two processes map counts half in each; and only pages that hold data (anonymous
ones and shared memory), not those of files, so that it does not matter how many processes have loaded the
same libraries.
"""

from __future__ import annotations

import re
from pathlib import Path

_COUNTED = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)


def data_nbytes(pid: int) -> int:
    """Bytes of data that the process `pid` holds now: `Pss_Anon` and `Pss_Shmem`.

    Raises:
        RuntimeError: a kernel that does not say (before Linux 5.9).
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = _COUNTED.findall(text)
    if not found:
        raise RuntimeError("/proc/<pid>/smaps_rollup has no Pss_Anon: Linux 5.9 or newer is needed")
    return 1024 * sum(map(int, found))


def available_nbytes() -> int:
    """Bytes that can be taken on this machine without pushing anything out."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found, "/proc/meminfo has no MemAvailable"
    return 1024 * int(found[1])


class Peak:
    """The most that each process held, of what was sampled.

    Call it from outside of the processes, again and again, while they work.
    """

    def __init__(self, pids: list[int]) -> None:
        self.nbytes = dict.fromkeys(pids, 0)

    def __call__(self) -> None:
        for pid in self.nbytes:
            self.nbytes[pid] = max(self.nbytes[pid], data_nbytes(pid))
