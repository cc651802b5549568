"""Refuses random numbers of the host that are no inputs, and values that a step takes from a queue or a file.

A capture would draw or take them once.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from tutti.capture.python.drawn_numbers import BEFORE_THE_STEP, Draws
from tutti.capture.python.held_values import Table, named
from tutti.capture.python.ways_out import Told
from tutti.errors import CaptureError
from tutti.graph.edits.patch import hook_here
from tutti.user_lines import quoted, user_line


@contextlib.contextmanager
def host_values_watched(tables: Sequence[Table], draws: Draws) -> Iterator[None]:
    """Raise if a trace inside draws otherwise than by `draws` from a generator of the host: a global one, or
    one in `tables`.

    It checks around each module's call, so that the error can name it. Generators that the step makes itself
    (`random.Random(0)`, `numpy.random.default_rng`) escape it: they give the same numbers at every call.

    Also raises if the trace takes from a queue or a file in `tables`, or sets a value of a thread or context.
    """
    watched = {name: read for name, _, x in named(tables) if (read := _reader(x)) is not None}
    before, lines = {name: read() for name, read in watched.items()}, list[str]()

    def changed() -> list[str]:
        return [f"{name}, in Python" for name, read in watched.items() if read() != before[name]]

    def look(_module: nn.Module, *_given: Any) -> None:
        if not lines and (changed() or draws.changed()):
            lines.append(user_line())

    hooks = [
        register_module_forward_pre_hook(hook_here(look)),
        register_module_forward_hook(hook_here(look)),
    ]
    try:
        with draws.watched():
            yield
    finally:
        for hook in hooks:
            hook.remove()
    by = f"by {quoted(lines[0])}" if lines else ""
    if draws.lost:
        told = draws.refused or Told(by, "", BEFORE_THE_STEP)
        raise CaptureError(
            f"the step draws random numbers from {' and '.join(draws.lost)}",
            at=told.at,
            why="random.random() and others that draw one number are inputs of the captured step; an array, "
            f"an order or a seed would be the same at every call{told.inside}",
            fix=told.fix,
        )
    if names := changed():
        raise CaptureError(
            f"the step changes {' and '.join(names)}",
            at=by,
            why="that would happen once, while the step is captured, and not at every call",
            fix="do it before the step, and hand the results over as arguments",
        )


def _reader(x: Any) -> Callable[[], Any] | None:
    """Reads the state of an object that a `get` or a `set` changes; None for any other value."""
    if isinstance(x, contextvars.ContextVar):
        return lambda: id(x.get(None))
    if isinstance(x, threading.local):
        return lambda: {key: id(value) for key, value in vars(x).items()}
    if isinstance(x, queue.Queue):
        return lambda: list(map(id, x.queue))
    is_file = isinstance(x, io.IOBase) and not x.closed and x.seekable()
    if is_file and (isinstance(x, io.StringIO | io.BytesIO) or not x.writable()):  # others are logs
        return x.tell
    return None
