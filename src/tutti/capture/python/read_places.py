"""The place of a read in the step's program, by which traces with other branches know the same read."""

from __future__ import annotations

import sys
from collections import Counter
from types import CodeType

from tutti.user_lines import is_dispatch

# The lines that lead to a read, as file, first line of the function and instruction.
Site = tuple[tuple[str, int, int], ...]
Place = tuple[Site, int]  # and the read's number there, from 1


class Places:
    """Names the reads of one trace."""

    def __init__(self) -> None:
        self._root: CodeType | None = None
        self._counts: Counter[Site] = Counter()

    def begin(self, root: CodeType) -> None:
        """Begin a trace, inside of a call of `root`."""
        self._root = root
        self._counts.clear()

    def next(self) -> Place:
        """The place of a read that runs now."""
        lines: list[tuple[str, int, int]] = []
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self._root:
            code = frame.f_code
            if not is_dispatch(code.co_filename):
                lines.append((code.co_filename, code.co_firstlineno, frame.f_lasti))
            frame = frame.f_back
        site = tuple(dict.fromkeys(lines))  # the calls of a recursion are turns of one loop
        self._counts[site] += 1
        return site, self._counts[site]
