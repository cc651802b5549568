"""Python's garbage collector while a step is compiled: rare, and over what the compilation has made alone."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

from tutti.torch_private.fake_tensors import FakeTensorMode

# New objects between two of its looks. Graphs are many small objects that stay: with Python's own 700 up to
# a fifth of a compilation goes to looking at them.
_NUM_NEW = 20_000
# Processor seconds. What a compilation of that long has left is looked at when it ends; what shorter ones
# leave, together after so many: a look takes a tenth of a second, one at the whole process three.
_LONG = 1.5
_TOGETHER = 8.0
# PyTorch keeps the results of calls on fakes for the life of the process: some 200 a new length, 2 kB each.
MOST_FAKE_CALLS = 20_000
_spent = 0.0  # by short ones since the last look at what they left
_depth = 0  # of compilations inside one another
_frozen_by_process = False


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Fewer looks inside, none of them at what was there before (imported modules are most of it), and one at
    the end of a long compilation, or of many, so that little stays that is not needed. A large
    cache of PyTorch's calls on fakes is emptied.

    A collector that is off stays off, and what the process has frozen itself stays frozen.
    """
    global _spent, _depth
    first, *others = gc.get_threshold()
    if first:
        gc.set_threshold(max(first, _NUM_NEW), *others)
    frozen_here = not _is_frozen()
    if frozen_here:
        gc.freeze()
    begin = time.thread_time()
    _depth += 1
    try:
        yield
        took = time.thread_time() - begin
        if took > _LONG:
            gc.collect()
            return
        _spent += took
        if _spent > _TOGETHER:
            if frozen_here:
                gc.unfreeze()
            gc.collect()
            _spent = 0.0
    finally:
        _depth -= 1
        if not _depth and FakeTensorMode.cache_info().size > MOST_FAKE_CALLS:
            FakeTensorMode.cache_clear()
        if frozen_here:
            gc.unfreeze()
        gc.set_threshold(first, *others)


def _is_frozen() -> bool:
    """Whether there are frozen objects: by a compilation around this one, or by the process.

    The process is asked until it says so once: it counts them one by one, 20 ms for those of PyTorch.
    """
    global _frozen_by_process
    if not _depth and not _frozen_by_process:
        _frozen_by_process = gc.get_freeze_count() > 0
    return _depth > 0 or _frozen_by_process
