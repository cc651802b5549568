"""Refuses numbers that a step draws by Python's `random` or NumPy, or takes from a queue or a file.

A capture would draw or take them once.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from tutti.capture.python.held_values import Table, named
from tutti.errors import CaptureError
from tutti.graph.edits.patch import hook_here
from tutti.user_lines import quoted, user_line


@contextlib.contextmanager
def no_host_randomness(tables: Sequence[Table]) -> Iterator[None]:
    """Raise if a trace inside draws from a generator of the host: a global one, or one in `tables`.

    It checks around each module's call, so that the error can name it. Generators that the step makes itself
    (`random.Random(0)`, `numpy.random.default_rng`) escape it: they give the same numbers at every call.

    Also raises if the trace takes from a queue or a file in `tables`, or sets a value of a thread or context.
    """
    watched = _watched(tables)
    before, lines = {name: one.read() for name, one in watched.items()}, list[str]()

    def changed() -> list[str]:
        return [name for name, one in watched.items() if one.read() != before[name]]

    def look(_module: nn.Module, *_given: Any) -> None:
        if not lines and changed():
            lines.append(quoted(user_line()))

    hooks = [
        register_module_forward_pre_hook(hook_here(look)),
        register_module_forward_hook(hook_here(look)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    names = changed()
    for name in names:
        watched[name].put_back(before[name])
    drawn = [name for name in names if watched[name].is_generator]
    if drawn:
        raise CaptureError(
            f"the step draws random numbers from {' and '.join(drawn)}",
            at=f"by {lines[0]}" if lines else "",
            why="they would be drawn once, while the step is captured, and be the same at every call",
            fix="torch.rand and the like; or draw before the step and hand them over as arguments",
        )
    if names:
        raise CaptureError(
            f"the step changes {' and '.join(names)}",
            at=f"by {lines[0]}" if lines else "",
            why="that would happen once, while the step is captured, and not at every call",
            fix="do it before the step, and hand the results over as arguments",
        )


@dataclass(frozen=True)
class _Watched:
    """What reads a state, of a generator or of another object, and puts it back, if that is possible."""

    read: Callable[[], Any]
    is_generator: bool = False
    put_back: Callable[[Any], None] = lambda _: None


def _watched(tables: Sequence[Table]) -> dict[str, _Watched]:
    """By name, the host's generators, NumPy's only if it is in use, and what `tables` hold."""
    found = {"Python's random": _Watched(random.getstate, True, random.setstate)}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        found["numpy.random"] = _Watched(lambda: _without_array(numpy.get_state()), True)
    for name, _, x in named(tables):
        if (one := _of_held(x, numpy)) is not None:
            found[f"{name}, in Python"] = one
    return found


def _of_held(x: Any, numpy: Any) -> _Watched | None:
    """For an object that a draw, a `get` or a `set` changes; None for any other value."""
    if isinstance(x, random.Random):
        return _Watched(x.getstate, True, x.setstate)
    if numpy is not None and isinstance(x, numpy.Generator):
        return _Watched(lambda: repr(x.bit_generator.state), True)
    if numpy is not None and isinstance(x, numpy.RandomState):
        return _Watched(lambda: repr(x.get_state(legacy=False)), True)
    if isinstance(x, contextvars.ContextVar):
        return _Watched(lambda: id(x.get(None)))
    if isinstance(x, threading.local):
        return _Watched(lambda: {key: id(value) for key, value in vars(x).items()})
    if isinstance(x, queue.Queue):
        return _Watched(lambda: list(map(id, x.queue)))
    is_file = isinstance(x, io.IOBase) and not x.closed and x.seekable()
    if is_file and (isinstance(x, io.StringIO | io.BytesIO) or not x.writable()):  # others are logs
        return _Watched(x.tell)
    return None


def _without_array(state: Any) -> tuple[Any, ...]:
    kind, words, *rest = state
    return kind, words.tobytes(), *rest
