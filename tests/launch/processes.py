"""What the kernel tells of other processes: whether they live, and whether they wait for something."""

from __future__ import annotations

import time
from pathlib import Path

SAMPLES, SAMPLE_SECONDS = 20, 0.02
MOST_SECONDS = 20.0


def lives(pid: int) -> bool:
    """A zombie does not: it has ended, and waits for a parent that may never look."""
    try:
        return _state(pid) != "Z"
    except OSError:
        return False


def wait_until_asleep(pids: list[int]) -> None:
    """Return once the main thread of each was found asleep nearly always for 0.4 s.

    One that computes or waits for a core is not asleep, however long that takes: on a busy machine a
    fixed time would be over before.
    """
    until = time.monotonic() + MOST_SECONDS
    while time.monotonic() < until:
        asleep = 0
        for _ in range(SAMPLES):
            asleep += all(_state(pid) == "S" for pid in pids)
            time.sleep(SAMPLE_SECONDS)
        if asleep >= 0.8 * SAMPLES:
            return


def _state(pid: int) -> str:
    """S is asleep, R running or ready to run, Z a zombie (proc(5))."""
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0]
