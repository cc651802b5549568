"""Clock that excludes suspension; used for leases and for the limits of waits.

To a process that resumes (after SIGSTOP, a paused virtual machine, a suspended laptop) all others seem silent
for long. Their heartbeats may be unread, or they were suspended too. So this clock counts a suspension as no
more than the longest time between two looks of a running process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# A busy host delays the next look of a process by less.
MOST_SECONDS = 2.0


class AwakeClock:
    """Seconds awake since it was made.

    Args:
        most_seconds: the longest time that may count between two looks; a longer one counts as this.
        clock: monotonic seconds.
    """

    def __init__(
        self, most_seconds: float = MOST_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._clock = most_seconds, clock
        self._seen, self._seconds = clock(), 0.0

    def look(self) -> float:
        """Seconds awake until now; call it regularly."""
        now = self._clock()
        self._seconds += min(now - self._seen, self._most)
        self._seen = now
        return self._seconds
