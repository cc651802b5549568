"""The end of a rank that has failed: it is limited, also where no thread can start."""

from __future__ import annotations

import atexit
import faulthandler
import signal
import threading
from typing import Any

import pytest

from tutti.launch import worker


def test_without_a_thread_a_signal_limits_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", no_thread)
    monkeypatch.setattr(threading, "_shutdown", lambda: None)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    before = signal.getsignal(signal.SIGALRM)
    try:
        worker._finish(1)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= worker.EXIT_SECONDS
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
