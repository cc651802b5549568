"""The line at which a step reads a value, the user's own or a library's, and the fix."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

from tutti.capture.python.library_options import option_of
from tutti.user_lines import is_users, quoted

# The code of a frame, and its line.
_Frame = tuple[CodeType, int]
_STDLIB = sysconfig.get_path("stdlib")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")


@dataclass(frozen=True)
class Told:
    """An error's text about a line: its line, a part of the reason, and the fix."""

    at: str
    inside: str
    fix: str


def of_stack(fix: str) -> Told:
    """The current line of Python; `fix` is for a line of the user's own."""
    found: list[_Frame] = []
    frame = sys._getframe(1)
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return _told(found, fix)


def of_error(error: BaseException, fix: str) -> Told:
    """The line that raised `error`."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return _told([(frame.f_code, line) for frame, line in reversed(frames)], fix)


def _told(frames: Sequence[_Frame], fix: str) -> Told:
    """The text for frames, from the innermost one outwards."""
    users = [f for f in frames if is_users(f[0].co_filename)]
    if not users:
        return Told("", "", fix)
    code, line = users[0]
    path = code.co_filename
    if path.startswith(_STDLIB) and not _library(path):  # logging, say: it acts for its caller
        return _told(users[1:], fix)
    own = next((k for k, f in enumerate(users) if not _is_foreign(f[0].co_filename)), None)
    if not own:
        at = quoted(f"{path}:{line}")
        return Told(at, "", _OF_ASSERT if _is_assert(at) else fix)
    name, function = _library(path), code.co_qualname.partition(".<locals>")[0]
    option = option_of(f[0] for f in users[:own])
    return Told(
        quoted(f"{users[own][0].co_filename}:{users[own][1]}"),
        f"; {name} does so in {function} ({path}:{line})",
        option
        or f"an option of {name} that leaves this out, or {_own(function)}; or this call before the "
        "step, its result handed over as an argument",
    )


def _own(function: str) -> str:
    """What the user may write in place of a library's function or method."""
    owner, _, method = function.rpartition(".")
    if not owner:
        return f"a function of your own in place of {function}"
    return f"a subclass of {owner} with a {method} of your own"


def _is_foreign(path: str) -> bool:
    return bool(_library(path)) or path.startswith(_STDLIB)


_OF_ASSERT = (
    "return the condition from the step and assert it there; or PYTHONOPTIMIZE=1, which leaves "
    "assertions out"
)


def _is_assert(at: str) -> bool:
    return bool(re.search(r":\d+  (.*: )?assert\b", at))


def _library(path: str) -> str:
    """The package that a file belongs to; "" for a user's own."""
    found = _INSTALLED.search(path)
    return found[1].removesuffix(".py") if found else ""
