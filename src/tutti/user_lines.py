"""Finds the user's own lines and frames, and reduces tracebacks to them."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from collections.abc import Mapping
from functools import cache
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakValueDictionary

import torch

from tutti.errors import CommError, TuttiError

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_FX = f"{os.sep}fx{os.sep}"
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
# The global of generated code that keeps its table alive.
LINES = "__tutti_lines__"


def is_users(path: str) -> bool:
    """Whether the code of this file belongs neither to torch nor to tutti."""
    return not path.startswith((_HERE, _TORCH, "<")) and "contextlib" not in path


@cache
def is_dispatch(path: str) -> bool:
    """Whether the code of this file leads from a call to a kernel: tutti's, and private code of PyTorch."""
    inside = path.removeprefix(_TORCH)
    private = inside != path and (f"{os.sep}_" in inside or inside.startswith(_FX))
    return private or path.startswith((_HERE, "<"))


def user_line() -> str:
    """`file:line` of the innermost Python frame that belongs neither to torch nor to tutti."""
    frame = _users_frame(sys._getframe(1))
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def program_line() -> str:
    """`user_line`, of the innermost frame that belongs to no installed library either, if there is one."""
    frame = first = _users_frame(sys._getframe(1))
    while frame is not None and any(name in frame.f_code.co_filename for name in _INSTALLED):
        frame = _users_frame(frame.f_back)
    frame = frame or first
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def users_level() -> int:
    """The `stacklevel` with which a warning of the caller names the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def quoted(source: str) -> str:
    """`train.py:12  the line's text`."""
    path, _, line = source.rpartition(":")
    text = linecache.getline(path, int(line)).strip() if line.isdigit() else ""
    return f"{source}  {text}".strip()


class LineTable(dict[int, str]):
    """From the lines of generated code to the user's: `{45: "train.py:12"}`.

    `file` is the name of a file under which to compile the code.

    Args:
        name: that of the function.
        lines: the table.
    """

    def __init__(self, name: str, lines: Mapping[int, str]) -> None:
        super().__init__(lines)
        self.file = f"<tutti {name} {next(_numbers)}>"
        _tables[self.file] = self


_numbers = itertools.count()
_tables: WeakValueDictionary[str, LineTable] = WeakValueDictionary()


def line_of_generated(file: str, number: int) -> str:
    """The user's line, such as "train.py:12", of a line of generated code; "" for other code."""
    table = _tables.get(file)
    return "" if table is None else table.get(number, "")


def generated_line(frame: FrameType, number: int) -> str:
    """`line_of_generated` for a line of the code of a frame."""
    return line_of_generated(frame.f_code.co_filename, number)


def note_line(error: BaseException, source: str) -> None:
    """Add the user's line, such as "train.py:12", to an error of an op; a `TuttiError` has its own."""
    if source and not isinstance(error, TuttiError):
        error.add_note(f"at {quoted(source)}")


class OnlyUsersFrames:
    """Keeps only the user's own lines in the traceback of a `TuttiError`; a tracer adds dozens of others.

    A `CommError` keeps all frames: the report of a lost rank reads its collective there
    (`launch.whereabouts`).
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, _: Any, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, TuttiError) and not isinstance(error, CommError):
            error.__traceback__ = _users(traceback)


def _users(traceback: TracebackType | None) -> TracebackType | None:
    if traceback is None:
        return None
    inner = _users(traceback.tb_next)
    if not is_users(traceback.tb_frame.f_code.co_filename):
        return inner
    return TracebackType(inner, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)
