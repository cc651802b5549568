"""Notes SIGINT and SIGTERM, and lets the training step in progress end."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any, NoReturn

# In the order of the bits of a vote.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SIGNAL_BITS = (1 << len(SIGNALS)) - 1
# A launcher may pass a Ctrl-C on a second time; a later one is the user's, who does not want to wait.
AGAIN_SECONDS = 2.0


class StopSignals:
    """The handlers of one run, from `install` to `restore`.

    A signal is only noted. A second Ctrl-C, later than `AGAIN_SECONDS`, raises `KeyboardInterrupt` at once,
    unless the run is `saving`. Signals that the process ignores, as under `nohup`, stay ignored.
    """

    def __init__(self) -> None:
        self.vote = 0
        self.saving = False
        self._before: dict[signal.Signals, Any] = {}
        self._first = 0.0

    def install(self) -> None:
        """Take over the signals; nothing happens in a thread other than the main one."""
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        for number in SIGNALS:
            found = signal.getsignal(number)
            if found not in (signal.SIG_IGN, None):  # None: not of Python
                self._before[number] = found
                signal.signal(number, self._note)
        _INSTALLED.add(self)

    def restore(self) -> None:
        """Put the former handlers back, unless the script has set others since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)
        self._before.clear()
        _INSTALLED.discard(self)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now, vote = time.monotonic(), 1 << SIGNALS.index(signal.Signals(number))
        again = number == signal.SIGINT and self.vote & vote and not self.saving
        if again and now - self._first > AGAIN_SECONDS:
            raise KeyboardInterrupt
        self._first = self._first if self.vote & vote else now
        self.vote |= vote


def leave_as_told(vote: int) -> NoReturn:
    """End the script as the signal of a vote does: by `KeyboardInterrupt`, or with exit code 143."""
    if vote & 1 << SIGNALS.index(signal.SIGTERM):
        raise SystemExit(128 + signal.SIGTERM)
    raise KeyboardInterrupt


def _forget() -> None:
    """A forked child (a data loader's) ends at SIGTERM, and leaves Ctrl-C to its parent."""
    for one in list(_INSTALLED):
        one._before.clear()
        for number, found in zip(SIGNALS, (signal.SIG_IGN, signal.SIG_DFL), strict=True):
            if signal.getsignal(number) == one._note:
                signal.signal(number, found)
    _INSTALLED.clear()


_INSTALLED: weakref.WeakSet[StopSignals] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget)
