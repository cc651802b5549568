"""How a command ends: what is told of an error, and the end of a process in the middle of a user's script."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import sys
import tempfile
from typing import Any, NoReturn

import typer

from tutti.errors import TuttiError
from tutti.launch.script import error_text, exit_code

MISTAKE, FAILED, INTERRUPTED = 2, 1, 130
_JOIN_SECONDS = 1.0
_REMOVE = ("multiprocessing.synchronize", "multiprocessing.util")


def told(error: BaseException | None) -> int:
    """Print an error, if there is one, for the user; the exit code."""
    if error is None:
        return 0
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        return exit_code(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if not isinstance(error, BrokenPipeError):  # nobody reads any more
        print(error_text(error), file=sys.stderr, flush=True)
    return MISTAKE if isinstance(error, TuttiError) else FAILED


class OwnProcess:
    """Whether this process is the command's own, or that of a test which goes on."""

    _is_own = False

    @classmethod
    def begin(cls) -> None:
        """This process is the command's own."""
        cls._is_own = True

    @classmethod
    def leave(cls, code: int) -> None:
        """End the command's own process at once.

        Neither `except`, `finally` and `atexit` of the user's script nor its threads run any more. Processes
        that it has started by `multiprocessing` (workers of a `DataLoader`) end, too; temporary folders go.
        """
        if cls._is_own:
            _end_process(code)


def _end_process(code: int) -> NoReturn:
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(_JOIN_SECONDS)
    _remove_what_is_left()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _remove_what_is_left() -> None:
    """Remove temporary folders and semaphores, as Python does at its own end."""
    ends: list[Any] = [
        x.cleanup for x in gc.get_objects() if issubclass(type(x), tempfile.TemporaryDirectory)
    ]
    for one in list(getattr(multiprocessing.util, "_finalizer_registry", {}).values()):
        if getattr(getattr(one, "_callback", None), "__module__", "") in _REMOVE:
            ends.append(one)
    for end in ends:
        with contextlib.suppress(Exception):
            end()
