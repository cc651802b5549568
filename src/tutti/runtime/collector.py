"""Python's garbage collector, which would look again and again while a step is compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# New objects between two of its looks. Graphs are many small objects that stay: with Python's own 700 up to
# a fifth of a compilation goes to looking at them.
_NUM_NEW = 20_000


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Fewer looks inside; a collector that is off stays off."""
    first, *others = gc.get_threshold()
    if first:
        gc.set_threshold(max(first, _NUM_NEW), *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
