"""How a worker of a loader starts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerStart:
    """Ctrl-C reaches every process of a terminal: the loop's process decides, and ends its workers.

    Then the user's function runs, with the worker's number.
    """

    init: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        """Begin as worker `number`."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.init is not None:
            self.init(number)
