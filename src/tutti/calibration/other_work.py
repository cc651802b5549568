"""Other work on this machine, beside which a calibration or a plan measures too slow figures."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

_TIMES = Path("/proc/stat")
# Seconds of one look, and the number of processors that may be busy meanwhile: looking takes some, too.
_SECONDS, _FEW = 0.5, 0.25


CALIBRATION = (
    "beside it figures come out too slow, a collective's start up to ten times. Calibrate again when it has "
    "ended"
)
PLAN = (
    "beside it some kernels are timed as too slow, and another layout may come out as the fastest. Plan "
    "again when it has ended"
)


def warn_of_other_work(consequence: str, seconds: float = _SECONDS) -> None:
    """Warn if other processes keep processors busy; a host that does not tell is taken to be idle."""
    busy = busy_processors(seconds)
    if busy is not None and busy > _FEW:
        warnings.warn(
            f"other work keeps {busy:.1f} of {os.cpu_count()} processors busy: {consequence}",
            stacklevel=3,
        )


def busy_processors(seconds: float) -> float | None:
    """Processors that were busy, on average over `seconds`; None where the host does not tell."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None or after[1] <= before[1]:
        return None
    share = (after[0] - before[0]) / (after[1] - before[1])
    return share * (os.cpu_count() or 1)


def _ticks() -> tuple[int, int] | None:
    """Ticks of all processors since the start of the host: busy ones, and all."""
    try:
        line = _TIMES.read_text().partition("\n")[0]
    except OSError:
        return None
    user, nice, system, idle, waiting, *others = map(int, line.split()[1:9])
    busy = user + nice + system + sum(others)
    return busy, busy + idle + waiting
