"""Signals that end a launcher raise in its main thread, so that it can end its processes first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Signaled(BaseException):
    """The launcher got a signal to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """SIGTERM and the like raise; by default the launcher would end before its processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raised(number: int, _frame: Any) -> None:
        raise Signaled(signal.Signals(number))

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, raised) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
