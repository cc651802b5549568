"""Finds a rank's line of the user's program, and its collective, from its stack."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.launch.thread_stacks import Stack
from tutti.user_lines import line_of_generated

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
        "launch/gathering.py",
    )
)
_C10D = "distributed_c10d.py"
# How the names of the functions of torch.distributed begin that ask this process only.
_QUERIES = ("get_", "is_", "_get_", "_is_", "__", "WORLD")


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


def may_wait(stack: Stack) -> bool:
    """Whether the stack is inside a collective or a message, to go by its files alone."""
    files = {place.file for place in stack}
    return any(name in files for name in _WAITING) or bool(_plain_calls(stack))


def wait(stack: Stack, cpu_seconds: float = 0.0) -> Waiting | None:
    """The stack's current collective or message, if there is one.

    Args:
        stack: of a thread, with its frames; as text it names calls of torch.distributed only.
        cpu_seconds: the thread's processor time. A plain collective of torch.distributed does not identify
            its call; there a thread that still computes does not wait.
    """
    for name in _WAITING:
        place = next((x for x in stack if x.file == name), None)
        owner = place.variables().get("self") if place is not None else None
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
    what = inner[-1].function
    lines = tuple((x.function, x.line) for x in inner)
    polls = what == "init_process_group"  # a file, and so computes while it waits
    computed = 0 if polls else round(cpu_seconds * 1000)
    return Waiting((lines, computed), what, user_line(stack), _missing(stack))


def _plain_calls(stack: Stack) -> Stack:
    """The calls of torch.distributed, innermost first; none if they ask this process only (`get_rank`)."""
    inner = [x for x in stack if x.file.endswith(_C10D)]
    return [] if inner and inner[-1].function.startswith(_QUERIES) else inner


def _members(owner: Any, current: Any) -> tuple[int, ...]:
    """The ranks that a `Gathering` waits for, or the other ranks in the group of a collective, where
    `owner` is a `comm.collectives.in_collective.InCollective`."""
    missing = getattr(owner, "missing", None)
    if isinstance(missing, tuple):
        return missing
    groups = getattr(owner, "groups", ())
    return _others(groups[current.axes]) if current.axes in groups else ()


def _missing(stack: Stack) -> tuple[int, ...]:
    """The ranks that the stack waits for, as far as its frames show."""
    for place in stack:
        if not place.file.startswith(_COMM):
            continue
        names = place.variables()
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
    outside = next((i for i, x in enumerate(stack) if "runpy" in x.file), len(stack))
    said = [f"{_short(x.file)}:{x.line} in {x.function}" for x in stack[:outside]]
    return said[:most][::-1]


def user_line(stack: Stack) -> str:
    """The innermost line of the user, as "train.py:12"; "" if there is none."""
    for place in stack:
        if mapped := line_of_generated(place.file, place.line):
            return mapped
        if place.file.startswith(_TUTTI):
            # The player of a pipeline keeps the line of its current message (`execution.loops`).
            line_of_message = getattr(place.variables().get("self"), "line", "")
            if line_of_message and isinstance(line_of_message, str):
                return line_of_message
        if not _is_library(place.file):
            return f"{_short(place.file)}:{place.line}"
    return ""


def collective(stack: Stack) -> str:
    """The stack's current collective, as "all_reduce over data (4 kB)"; "" if there is none."""
    for place in stack:
        if place.file.startswith(_TUTTI):
            # A player keeps its current collective (`comm.InCollective.current`).
            current = getattr(place.variables().get("self"), "current", None)
            if current is not None:
                return str(current)
    calls = _plain_calls(stack)
    return calls[-1].function if calls else ""


def _is_library(filename: str) -> bool:
    if filename.startswith(("<", _TUTTI)):
        return True
    return "site-packages" in filename or filename.startswith(sysconfig.get_path("stdlib"))


def _short(filename: str) -> str:
    path = Path(filename).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
