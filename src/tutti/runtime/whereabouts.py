"""Which line of the user's program a rank is at, and in which collective, read from its stack."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

_TUTTI = str(Path(__file__).resolve().parent.parent)
_C10D = "distributed_c10d.py"
# Generated code may carry a table from its own lines to the user's: `{45: "train.py:12"}`.
LINES = "__tutti_lines__"


def main_stack(main_thread: int) -> list[tuple[FrameType, int]]:
    """The frames of the main thread and their lines, innermost first."""
    return list(_outward(sys._current_frames().get(main_thread)))


def traceback_stack(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """The frames of a traceback and their lines, innermost first."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[::-1]


def user_line(stack: list[tuple[FrameType, int]]) -> str:
    """The innermost line that is the user's, as "train.py:12"; "" if there is none."""
    for frame, line in stack:
        mapped = frame.f_globals.get(LINES, {}).get(line)
        if mapped:
            return str(mapped)
        if frame.f_code.co_filename.startswith(_TUTTI):
            # What plays a pipeline keeps the line behind the message it is in (`runtime.loops`).
            line_of_message = getattr(frame.f_locals.get("self"), "line", "")
            if line_of_message and isinstance(line_of_message, str):
                return line_of_message
        if not _is_library(frame.f_code.co_filename):
            return f"{_short(frame.f_code.co_filename)}:{line}"
    return ""


def collective(stack: list[tuple[FrameType, int]]) -> str:
    """The collective that the stack is in, as "all_reduce over data (4 kB)"; "" if in none."""
    for frame, _ in stack:
        name = frame.f_code.co_filename
        if name.startswith(_TUTTI):
            # A player keeps the collective it is in (`comm.ProcessGroups.current`).
            current = getattr(frame.f_locals.get("self"), "current", None)
            if current is not None:
                return str(current)
    for frame, _ in reversed(stack):
        if frame.f_code.co_filename.endswith(_C10D):
            return frame.f_code.co_name
    return ""


def _outward(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _is_library(filename: str) -> bool:
    if filename.startswith(("<", _TUTTI)):
        return True
    return "site-packages" in filename or filename.startswith(sysconfig.get_path("stdlib"))


def _short(filename: str) -> str:
    path = Path(filename).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
