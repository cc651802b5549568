"""A warning for a step that reads the clock: it does so once, during capture."""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tutti.capture.patch_table import CLOCKS
from tutti.capture.python.held_values import Table, named
from tutti.capture.python.reach import is_code_of_library
from tutti.graph.edits.patch import here_only, replaced
from tutti.user_lines import quoted


@contextlib.contextmanager
def clocks_watched(tables: Sequence[Table]) -> Iterator[None]:
    """Inside, warn once of a user's line that reads a clock of `time`: its value is fixed at capture.

    `tables` are those that the step reaches: they may hold a clock (`from time import time`).
    `datetime.now()` escapes it.
    """
    told: set[str] = set()

    def watched(name: str, clock: Callable[[], Any]) -> Callable[[], Any]:
        def read() -> Any:
            frame = sys._getframe(2)  # above the thread's guard
            at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if at not in told and not is_code_of_library(frame.f_code):
                told.add(at)
                warnings.warn(
                    f"time.{name}() at {quoted(at)} is read once, while the step is captured: each call has "
                    "that value; time the step from outside",
                    stacklevel=3,
                )
            return clock()

        return read

    clocks = {patch.original: patch.name for patch in CLOCKS.values()}
    with contextlib.ExitStack() as stack:
        pairs = ((CLOCKS[name], watched(name, clock)) for clock, name in clocks.items())
        stack.enter_context(replaced(*pairs))
        for _, entry, value in list(named(tables)):
            is_clock = isinstance(value, types.BuiltinFunctionType) and value in clocks
            if is_clock and entry.table.writable:
                entry.put(here_only(watched(clocks[value], value), value))
                stack.callback(entry.put, value)
        yield
