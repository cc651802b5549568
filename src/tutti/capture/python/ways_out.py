"""The line at which a step reads a value, the user's own or a library's, and the fix."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.user_lines import is_users, quoted

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
    found: list[tuple[str, int, str]] = []
    frame = sys._getframe(1)
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return _told(found, fix)


def of_error(error: BaseException, fix: str) -> Told:
    """The line that raised `error`."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _told([(f.filename, f.lineno or 0, f.name) for f in frames], fix)


def _told(frames: Sequence[tuple[str, int, str]], fix: str) -> Told:
    """The text for frames, from the innermost one outwards."""
    users = [f for f in frames if is_users(f[0])]
    if not users:
        return Told("", "", fix)
    path, line, function = users[0]
    if path.startswith(_STDLIB) and not _library(path):  # logging, say: it acts for its caller
        return _told(users[1:], fix)
    own = next((f for f in users if not (_library(f[0]) or f[0].startswith(_STDLIB))), None)
    if own is None or own is users[0]:
        at = quoted(f"{path}:{line}")
        return Told(at, "", _OF_ASSERT if _is_assert(at) else fix)
    name = _library(path)
    return Told(
        quoted(f"{own[0]}:{own[1]}"),
        f"; {name} does so in {function} ({path}:{line})",
        f"an option of {name} that leaves this out, or a subclass with a {function} of your own; or this "
        "call before the step, its result handed over as an argument",
    )


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
