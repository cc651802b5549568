"""A step that reads the clock is told that it does so once, while it is captured."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest import mock

from tutti.capture.reach import is_code_of_library
from tutti.capture.source import quoted

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")


@contextlib.contextmanager
def clocks_watched() -> Iterator[None]:
    """Inside, a user's line that reads a clock of `time` is warned of, once: its value stays that of now.

    Clocks that are called by a name of their own (`from time import time`) are not seen.
    """
    told: set[str] = set()
    here = threading.get_ident()

    def watched(name: str, clock: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(clock)
        def read() -> Any:
            frame = sys._getframe(1)
            at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            ours = threading.get_ident() == here and not is_code_of_library(frame.f_code)
            if ours and at not in told:
                told.add(at)
                warnings.warn(
                    f"time.{name}() at {quoted(at)} is read once, while the step is captured: each call has "
                    "that value; time the step from outside",
                    stacklevel=2,
                )
            return clock()

        return read

    names = [*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS)]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(time, name, watched(name, getattr(time, name))))
        yield
