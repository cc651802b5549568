"""Trial steps: steps of an optimizer that make slots, or show the form of its first step.

They are none of the user's steps: Python values outside of the optimizer that they change, such as a counter
of a class, get their values back. `capture/python` knows these values, and says here how to keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Keeper = Callable[[Any], AbstractContextManager[Any]]
_keepers: list[Keeper] = []


def keep_outside_by(keeper: Keeper) -> None:
    """Set the function that returns, for an optimizer, a context that restores values outside of it."""
    _keepers[:] = [keeper]


@contextmanager
def trial(optimizer: Any) -> Iterator[None]:
    """Context of trial steps of an optimizer, or of a copy of it."""
    with _keepers[0](optimizer) if _keepers else nullcontext():
        yield
