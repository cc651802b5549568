"""The ranks of tests: a call that ends early leaves no answer for the next one."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from ranks import Ranks


class Late(BaseException):
    """As the timeout of a test raises it, wherever the test waits."""


def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def _interrupted(call: Any) -> None:
    def stop(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Late):
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_next_call_gets_its_own_answer() -> None:
    ranks = Ranks()
    try:
        assert ranks.run(slow, 0.0, n=2) == [0.0, 0.0]
        _interrupted(lambda: ranks.run(slow, 1.0, n=2))
        assert ranks.run(slow, 0.0, n=2) == [0.0, 0.0]
        assert ranks.after(slow, 0.0).result == 0.0
        _interrupted(lambda: ranks.after(slow, 1.0))
        assert ranks.after(slow, 0.25).result == 0.25
    finally:
        ranks.close()
