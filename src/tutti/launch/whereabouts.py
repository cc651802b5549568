"""Finds a rank's line of the user's program, and its collective, from its stack."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_TUTTI = str(Path(__file__).resolve().parent.parent)
_COMM = os.path.join(_TUTTI, "comm", "")
# The holders of a rank's current collective or message (`current`), the innermost first.
_WAITING = tuple(
    os.path.join(_TUTTI, *name.split("/"))
    for name in (
        "comm/collectives/process_groups.py",
        "data/shared_reads.py",
        "execution/loops.py",
        "execution/edge_channels.py",
    )
)
_C10D = "distributed_c10d.py"
# How the names of the functions of torch.distributed begin that ask this process only.
_QUERIES = ("get_", "is_", "_get_", "_is_", "__", "WORLD")
# Generated code may carry a table from its own lines to the user's: `{45: "train.py:12"}` (user_lines.LINES).
LINES = "__tutti_lines__"


# Frames and their lines, innermost first.
Stack = list[tuple[FrameType, int]]


@dataclass(frozen=True)
class Waiting:
    """A rank's current collective or message.

    Args:
        key: differs from that of the next wait of the same kind.
        what: such as "all_reduce over data (4 kB)".
        line: the user's, such as "train.py:12".
        ranks: the late ones; for torch.distributed, all others of the group.
    """

    key: object
    what: str
    line: str
    ranks: tuple[int, ...]

    def same(self, other: Waiting) -> bool:
        """Whether both are one wait."""
        return self.key == other.key


def wait(stack: Stack, cpu_seconds: float = 0.0) -> Waiting | None:
    """The stack's current collective or message, if there is one.

    It inspects only frames in which ranks wait: an inspection makes Python keep their variables.

    Args:
        stack: of a thread.
        cpu_seconds: the thread's processor time. A plain collective of torch.distributed does not identify
            its call; there a thread that still computes does not wait.
    """
    for name in _WAITING:
        frame = next((f for f, _ in stack if f.f_code.co_filename == name), None)
        owner = _variables(frame).get("self") if frame is not None else None
        current = getattr(owner, "current", None)
        if hasattr(current, "began_seconds"):  # a `comm.failure.Wait`
            ranks = _missing(stack) or _members(owner, current)
            return Waiting(current, str(current), user_line(stack), ranks)
    return _plain_wait(stack, cpu_seconds)


def _plain_wait(stack: Stack, cpu_seconds: float) -> Waiting | None:
    """A call of torch.distributed outside of tutti, such as those before the first step."""
    inner = _plain_calls(stack)
    if not inner:
        return None
    what = inner[-1].f_code.co_name
    frames = tuple((id(frame), frame.f_lasti) for frame in inner)
    polls = what == "init_process_group"  # a file, and so computes while it waits
    computed = 0 if polls else round(cpu_seconds * 1000)
    return Waiting((frames, computed), what, user_line(stack), _missing(stack))


def _plain_calls(stack: Stack) -> list[FrameType]:
    """The frames of torch.distributed, innermost first; none if they ask this process only (`get_rank`)."""
    inner = [frame for frame, _ in stack if frame.f_code.co_filename.endswith(_C10D)]
    return [] if inner and inner[-1].f_code.co_name.startswith(_QUERIES) else inner


def _members(owner: Any, current: Any) -> tuple[int, ...]:
    """The other ranks in a collective's group; `owner` is a `comm.collectives.in_collective.InCollective`."""
    groups = getattr(owner, "groups", ())
    return _others(groups[current.axes]) if current.axes in groups else ()


def _missing(stack: Stack) -> tuple[int, ...]:
    """The ranks that the stack waits for, as far as its frames show."""
    for frame, _ in stack:
        if not frame.f_code.co_filename.startswith(_COMM):
            continue
        names = _variables(frame)
        owner = names.get("self")
        late, count = getattr(owner, "late", None), names.get("count")
        if callable(late) and isinstance(count, int):  # `comm.signals.Signals`
            found: Any = late(count)
            return tuple(found)
        ranks = _others(names.get("group")) or _others(getattr(owner, "_group", None))
        if ranks:
            return ranks
    return ()


def _others(group: Any) -> tuple[int, ...]:
    """The other ranks of a `comm.collectives.group.Group`; none for any other object."""
    ranks, position = getattr(group, "ranks", None), getattr(group, "position", None)
    if not isinstance(ranks, tuple) or not isinstance(position, int):
        return ()
    return ranks[:position] + ranks[position + 1 :]


def lines(stack: Stack, most: int = 12) -> list[str]:
    """The innermost frames of a script, outermost first, as "train.py:12 in main"; without tutti's start."""
    names = [frame.f_code.co_filename for frame, _ in stack]
    outside = next((i for i, name in enumerate(names) if "runpy" in name), len(names))
    said = [
        f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
        for frame, line in stack[:outside]
    ]
    return said[:most][::-1]


def main_stack(main_thread: int) -> list[tuple[FrameType, int]]:
    """The frames of the main thread and their lines, innermost first."""
    with _uncollected():
        return list(_outward(sys._current_frames().get(main_thread)))


def _variables(frame: FrameType) -> dict[str, Any]:
    with _uncollected():
        return frame.f_locals


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


def traceback_stack(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """The frames of a traceback and their lines, innermost first."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[::-1]


def user_line(stack: list[tuple[FrameType, int]]) -> str:
    """The innermost line of the user, as "train.py:12"; "" if there is none."""
    for frame, line in stack:
        mapped = frame.f_globals.get(LINES, {}).get(line)
        if mapped:
            return str(mapped)
        if frame.f_code.co_filename.startswith(_TUTTI):
            # The player of a pipeline keeps the line of its current message (`execution.loops`).
            line_of_message = getattr(_variables(frame).get("self"), "line", "")
            if line_of_message and isinstance(line_of_message, str):
                return line_of_message
        if not _is_library(frame.f_code.co_filename):
            return f"{_short(frame.f_code.co_filename)}:{line}"
    return ""


def collective(stack: list[tuple[FrameType, int]]) -> str:
    """The stack's current collective, as "all_reduce over data (4 kB)"; "" if there is none."""
    for frame, _ in stack:
        name = frame.f_code.co_filename
        if name.startswith(_TUTTI):
            # A player keeps its current collective (`comm.InCollective.current`).
            current = getattr(_variables(frame).get("self"), "current", None)
            if current is not None:
                return str(current)
    calls = _plain_calls(stack)
    return calls[-1].f_code.co_name if calls else ""


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
