"""Warnings of a command as one line each: "warning: ...".

A warning shows the line of the user's that it is about. Where a command itself computes there is none: the
line would be one of tutti's own, or of the library that reads the arguments.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_OWN_FOLDER = f"{Path(__file__).parents[1]}/"
_LIBRARIES = ("typer", "click")


def plain_warnings() -> None:
    """From now on this process shows warnings from tutti's own lines without them; others as Python does."""
    before = warnings.formatwarning

    def shown(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if _is_internal(filename):
            return f"warning: {message}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = shown


def _is_internal(filename: str) -> bool:
    if filename.startswith((_OWN_FOLDER, "<")) or filename == "sys":
        return True
    roots = [*map(Path, sys.path)]
    return any(one.name in _LIBRARIES and one.parent in roots for one in Path(filename).parents)
