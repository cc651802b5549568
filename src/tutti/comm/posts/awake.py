"""Time that this process was not stopped for, by which it judges others.

A process that was frozen (SIGSTOP, a paused virtual machine, a suspended laptop) finds when it goes on that
all others have been silent for long. Their signs of life may lie unread, or they were frozen too: by this
clock no more has passed than between two looks of a process that runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds awake since it was made.

    Args:
        most_seconds: what may pass at most between two looks; anything longer counts as so much.
        clock: seconds that only go forward.
    """

    def __init__(self, most_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most_seconds, clock
        self._seen, self._seconds = clock(), 0.0

    def look(self) -> float:
        """Seconds awake until now; to be called again and again."""
        now = self._clock()
        self._seconds += min(now - self._seen, self._most)
        self._seen = now
        return self._seconds
