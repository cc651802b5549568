"""Hides what a user's script prints, so that the output of the command is the answer alone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

_STDOUT = 1


class HiddenOutput:
    """Sends stdout nowhere while it is entered: that of Python, of native code and of child processes.

    The script's `sys.stdout` is an ordinary stream of a file, with a buffer and a descriptor of its own: the
    script may wrap, reconfigure or close it.
    """

    def __enter__(self) -> HiddenOutput:
        self._before: Any = sys.stdout
        self._encoding = getattr(sys.stdout, "encoding", None)
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):  # it may be closed
            self._descriptor = os.dup(_STDOUT)
        self._hide(open(os.devnull, "w", encoding=self._encoding))
        return self

    def __exit__(self, *_: object) -> None:
        self._reveal()
        if self._descriptor is not None:
            os.close(self._descriptor)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Within it, the stdout of before."""
        hidden = sys.stdout
        self._reveal()
        try:
            yield
        finally:
            self._hide(hidden)

    def _hide(self, stream: Any) -> None:
        _flush()
        if self._descriptor is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, _STDOUT)
            os.close(nowhere)
        sys.stdout = stream

    def _reveal(self) -> None:
        _flush()
        if self._descriptor is not None:
            os.dup2(self._descriptor, _STDOUT)
        sys.stdout = self._before


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        # The script may have closed it, or put anything in its place.
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
