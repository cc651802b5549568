"""Reads the stack of another thread, which goes on meanwhile.

A frame object that one thread holds keeps its variables after its function has returned in the other.
PyTorch relies on their end: `Tensor.__repr__` turns functorch off until a variable dies, and autograd copies
a gradient to which anything else refers. So the stack of a thread that runs is read as text, in one call
that never lets the other thread run. Frames are for a thread that waits: it returns from none of them.

`faulthandler.dump_traceback` makes no frame objects, but it walks all threads without Python's lock of their
list: the process crashes if a native thread (autograd's, a communication library's) enters Python meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, islice, repeat, takewhile
from operator import attrgetter, methodcaller
from types import FrameType, TracebackType
from typing import Any

_CODE_AND_LINE = attrgetter("f_code", "f_lineno")


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
    """The stack of the thread with this identifier, as text. It is empty if there is no such thread."""
    with _uncollected():
        # No bytecode runs inside `list`: this thread keeps the interpreter until the frames are dropped. The
        # iterators have no names, so they end in the same instruction.
        found = list(map(_CODE_AND_LINE, takewhile(bool, _lazy_frames(thread))))
    return [
        Place(code.co_filename, line or code.co_firstlineno, code.co_name) for code, line in found
    ]


def _lazy_frames(thread: int) -> Iterator[FrameType | None]:
    """The frames of a thread, innermost first, then None. It reads the first one when it is asked for it."""
    innermost = map(methodcaller("get", thread), iter(sys._current_frames, None))
    return accumulate(chain(islice(innermost, 1), repeat("f_back")), getattr)


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
