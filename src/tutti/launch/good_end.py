"""Calls at the end of a script that ends well: without an exception, and with exit code 0."""

from __future__ import annotations

import atexit
from collections.abc import Callable

_CALLS: list[Callable[[], None]] = []


def at_good_end(call: Callable[[], None]) -> None:
    """Let this process call `call` at its exit, unless its script fails."""
    _CALLS.append(call)
    atexit.register(call)


def forget_good_end() -> None:
    """The script has failed: none of these calls is made."""
    for call in _CALLS:
        atexit.unregister(call)
