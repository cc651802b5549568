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
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from tutti.capture.python.held_values import Table, named
from tutti.errors import CaptureError
from tutti.user_lines import quoted, user_line


@contextlib.contextmanager
def no_host_randomness(tables: Sequence[Table]) -> Iterator[None]:
    """Raise if a trace inside draws from a generator of the host: a global one, or one in `tables`.

    It checks around each module's call, so that the error can name it. Generators that the step makes itself
    (`random.Random(0)`, `numpy.random.default_rng`) escape it: they give the same numbers at every call.

    Also raises if the trace takes from a queue or a file in `tables`, or sets a value of a thread or context.
    """
    held = {name: x for name, _, x in named(tables) if _state_of(x) is not None}
    kept = {name: _state_of(x) for name, x in held.items()}
    before, lines = _states(), list[str]()

    def look(_module: nn.Module, *_given: Any) -> None:
        if not lines and _states() != before:
            lines.append(quoted(user_line()))

    hooks = [
        register_module_forward_pre_hook(look),
        register_module_forward_hook(look),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for name, state in kept.items():
        if _state_of(held[name]) != state:
            drawn = _put_back(held[name], state)
            raise CaptureError(
                f"the step {'draws random numbers from' if drawn else 'changes'} {name}, in Python",
                at=quoted(user_line()),
                why="that would happen once, while the step is captured, and not at every call",
                fix="torch.rand and the like for random numbers; or do it before the step, and hand the "
                "results over as arguments",
            )
    after = _states()
    changed = [name for name in before if after[name] != before[name]]
    if changed:
        raise CaptureError(
            f"the step draws random numbers from {' and '.join(changed)}",
            at=f"by {lines[0]}" if lines else "",
            why="they would be drawn once, while the step is captured, and be the same at every call",
            fix="torch.rand and the like; or draw before the step and hand them over as arguments",
        )


def _state_of(x: Any) -> Any:
    """What a draw, a `get` or a `set` changes; None for any other value."""
    if isinstance(x, random.Random):
        return x.getstate()
    if isinstance(x, contextvars.ContextVar):
        return ("context", id(x.get(None)))
    if isinstance(x, threading.local):
        return {key: id(value) for key, value in vars(x).items()}
    if isinstance(x, queue.Queue):
        return list(map(id, x.queue))
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(x, numpy.Generator):
        return repr(x.bit_generator.state)
    if numpy is not None and isinstance(x, numpy.RandomState):
        return repr(x.get_state(legacy=False))
    if isinstance(x, io.StringIO | io.BytesIO) and not x.closed:
        return ("file", x.tell())
    if isinstance(x, io.IOBase) and not x.closed and x.seekable() and not x.writable():
        return ("file", x.tell())  # one that is written is a log
    return None


def _put_back(x: Any, state: Any) -> bool:
    """Whether `x` is a generator; one of Python is put back."""
    if isinstance(x, random.Random):
        x.setstate(state)
    return isinstance(state, str) or isinstance(x, random.Random)


def _states() -> dict[str, Any]:
    """The states of the host's generators; NumPy's only if it is in use."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        _, words, *rest = numpy.get_state()
        states["numpy.random"] = (words.tobytes(), *rest)
    return states
