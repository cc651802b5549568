"""Python's garbage collector while a step is compiled: rare, and over what the compilation has made alone."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

# New objects between two of its looks. Graphs are many small objects that stay: with Python's own 700 up to
# a fifth of a compilation goes to looking at them.
_NUM_NEW = 20_000
# Processor seconds of compilation between two looks at all that it has left: one takes a tenth of a second,
# which is a tenth of what a batch of a new length costs.
_SECONDS = 1.5
_spent = 0.0


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Fewer looks inside, none of them at what was there before (imported modules are most of it), and one at
    the end of what has taken a while, so that little of a compilation stays that is not needed.

    A collector that is off stays off, and what the process has frozen itself stays frozen.
    """
    global _spent
    first, *others = gc.get_threshold()
    if first:
        gc.set_threshold(max(first, _NUM_NEW), *others)
    frozen_here = not gc.get_freeze_count()
    if frozen_here:
        gc.freeze()
    begin = time.thread_time()
    try:
        yield
        _spent += time.thread_time() - begin
        if _spent > _SECONDS:
            gc.collect()
            _spent = 0.0
    finally:
        if frozen_here:
            gc.unfreeze()
        gc.set_threshold(first, *others)
