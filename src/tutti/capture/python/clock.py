"""A step that reads the clock is told that it does so once, while it is captured."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any
from unittest import mock

from tutti.capture.python.held_values import Table, named
from tutti.capture.python.reach import is_code_of_library
from tutti.user_lines import quoted

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")


@contextlib.contextmanager
def clocks_watched(tables: Sequence[Table]) -> Iterator[None]:
    """Inside, a user's line that reads a clock of `time` is warned of, once: its value stays that of now.

    `tables` are those that the step reaches: a clock may stand there (`from time import time`).
    `datetime.now()` is not seen.
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
    clocks = {getattr(time, name): name for name in names}
    with contextlib.ExitStack() as stack:
        for clock, name in clocks.items():
            stack.enter_context(mock.patch.object(time, name, watched(name, clock)))
        for _, place, value in list(named(tables)):
            is_clock = isinstance(value, types.BuiltinFunctionType) and value in clocks
            if is_clock and place.table.writable:
                place.put(watched(clocks[value], value))
                stack.callback(place.put, value)
        yield
