"""Python's garbage collector while a step is compiled: rare, and over what the compilation has made alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# New objects between two of its looks. Graphs are many small objects that stay: with Python's own 700 up to
# a fifth of a compilation goes to looking at them.
_NUM_NEW = 20_000


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Fewer looks inside, none of them at what was there before (imported modules are most of it), and one at
    the end, so that nothing of the compilation stays that is not needed.

    A collector that is off stays off, and what the process has frozen itself stays frozen.
    """
    first, *others = gc.get_threshold()
    if first:
        gc.set_threshold(max(first, _NUM_NEW), *others)
    frozen_here = not gc.get_freeze_count()
    if frozen_here:
        gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        if frozen_here:
            gc.unfreeze()
        gc.set_threshold(first, *others)
