"""Refuses numbers drawn by Python's `random` or NumPy inside a step: a capture would draw them once."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from tutti.errors import CaptureError
from tutti.user_lines import quoted, user_line


@contextlib.contextmanager
def no_host_randomness() -> Iterator[None]:
    """Raise if a trace inside draws from a global generator of the host.

    It checks around each module's call, so that the error can name it. Generators that the step makes itself
    (`random.Random(0)`, `numpy.random.default_rng`) escape it.
    """
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
    after = _states()
    changed = [name for name in before if after[name] != before[name]]
    if changed:
        raise CaptureError(
            f"the step draws random numbers from {' and '.join(changed)}",
            at=f"by {lines[0]}" if lines else "",
            why="they would be drawn once, while the step is captured, and be the same at every call",
            fix="torch.rand and the like; or draw before the step and hand them over as arguments",
        )


def _states() -> dict[str, Any]:
    """The states of the host's generators; NumPy's only if it is in use."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        _, words, *rest = numpy.get_state()
        states["numpy.random"] = (words.tobytes(), *rest)
    return states
