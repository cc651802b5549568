"""A warning for a step that reads the clock or the system's random bytes: it does so once, during capture."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tutti.capture.patch_table import CLOCKS, ENTROPY
from tutti.capture.python.held_values import Table, named
from tutti.capture.python.reach import is_code_of_library
from tutti.graph.edits.patch import Patch, caller, here_only, replaced
from tutti.user_lines import quoted

# Modules whose functions draw the system's random bytes for their callers.
_DRAWING = ("random", "secrets", "uuid")


@contextlib.contextmanager
def read_once_watched(tables: Sequence[Table]) -> Iterator[None]:
    """Inside, warn once of a user's line that reads a clock of `time`, or bytes of `os.urandom`, also by
    `secrets`, `uuid` and `random.SystemRandom`: their value is fixed at capture.

    `tables` are those that the step reaches: they may hold a clock (`from time import time`).
    `datetime.now()` escapes it.
    """
    told: set[str] = set()

    def watched(patch: Patch, own: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any) -> Any:
            frame = _caller(caller())
            at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if at not in told and not is_code_of_library(frame.f_code):
                told.add(at)
                warnings.warn(_sentence(patch, quoted(at)), stacklevel=3)
            return own(*args)

        return read

    patches = (*CLOCKS.values(), *ENTROPY)
    found = {patch.original: patch for patch in patches}
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(*((p, watched(p, p.original)) for p in patches)))
        for _, entry, value in list(named(tables)):
            is_read = isinstance(value, types.BuiltinFunctionType) and value in found
            if is_read and entry.table.writable:
                entry.put(here_only(watched(found[value], value), value))
                stack.callback(entry.put, value)
        yield


def _caller(frame: types.FrameType) -> types.FrameType:
    """The frame that asks, or the one that asked a drawing function for it."""
    while frame.f_globals.get("__name__") in _DRAWING and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _sentence(patch: Patch, line: str) -> str:
    if patch in ENTROPY:
        name, fix = "os.urandom", "draw random numbers by torch"
    else:
        name, fix = f"time.{patch.name}", "time the step from outside"
    return f"{name}() at {line} is read once, while the step is captured: each call has that value; {fix}"
