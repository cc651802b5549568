"""Reads the stack of another thread, which goes on meanwhile.

A frame object that one thread holds keeps its variables after its function has returned in the other.
PyTorch relies on their end: `Tensor.__repr__` turns functorch off until a variable dies, and autograd copies
a gradient to which anything else refers. So the stack of a thread that runs is read as text, by
`faulthandler`, which makes no objects. Frames are for a thread that waits: it returns from none of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import IO, Any

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_PLACE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


@dataclass(frozen=True)
class Place:
    """A frame of a stack: its file, current line and function. `frame` is None if it was read as text."""

    file: str
    line: int
    function: str
    frame: FrameType | None = None

    def variables(self) -> dict[str, Any]:
        """The local variables, if the frame is known. Python keeps them as long as the frame."""
        if self.frame is None:
            return {}
        with _uncollected():
            return self.frame.f_locals


# Innermost first.
Stack = list[Place]


def stack_of(thread: int) -> Stack:
    """The stack of the thread with this identifier, as text: its hundred innermost frames.

    It is empty if there is no thread, or no file descriptor left.
    """
    try:
        with _scratch() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            text = file.read().decode("ascii", "replace")
    except OSError:
        return []
    found, inside = Stack(), False
    for line in text.splitlines():
        if header := _THREAD.match(line):
            inside = int(header[1], 16) == thread
        elif inside and (place := _PLACE.fullmatch(line)):
            found.append(Place(_plain(place[1]), int(place[2]), _plain(place[3])))
    return found


def _scratch() -> IO[bytes]:
    """A file in memory where the system has such: a disk may be full."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tutti-stack"), "w+b")
    return tempfile.TemporaryFile()


def frames_of(thread: int) -> Stack:
    """The stack of a thread that waits, with its frames. Drop them at once."""
    found, frame = Stack(), None
    with _uncollected():
        frame = sys._current_frames().get(thread)
        while frame is not None:
            found.append(_place(frame, frame.f_lineno))
            frame = frame.f_back
    return found


def traceback_stack(traceback: TracebackType | None) -> Stack:
    """The frames of a traceback."""
    found = Stack()
    while traceback is not None:
        found.append(_place(traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found[::-1]


def _place(frame: FrameType, line: int) -> Place:
    return Place(frame.f_code.co_filename, line, frame.f_code.co_name, frame)


def _plain(name: str) -> str:
    """A name with its characters beyond ASCII, which `faulthandler` escapes."""
    return _ESCAPED.sub(lambda m: chr(int(m[1] or m[2] or m[3], 16)), name)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Context for reading frames of another thread: Python collects no garbage.

    Until 3.11 a collection may begin while Python makes the object of a frame, or of its variables. The
    finalizers that it runs let the other thread go on and leave that frame, whose memory Python then reads.
    """
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
