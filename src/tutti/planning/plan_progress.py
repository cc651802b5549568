"""How far a plan is, on stderr: a line on a terminal, overwritten; else one every half minute."""

from __future__ import annotations

import sys
import time

_SECONDS_BETWEEN = 30.0  # lines where stderr is no terminal


class PlanProgress:
    """Called with (layouts done, layouts) before each; (0, 0) in the end clears the line."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        text = f"layout {done + 1} of {total}" if total else ""
        if sys.stderr.isatty():
            print(f"\r{text:<30}\r", end="", file=sys.stderr, flush=True)
        elif text and time.monotonic() >= self._said + _SECONDS_BETWEEN:
            self._said = time.monotonic()
            print(f"planning: {text}", file=sys.stderr, flush=True)
