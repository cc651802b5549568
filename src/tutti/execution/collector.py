"""Limits Python's garbage collector during compilation: rare, and over the compilation's objects only."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

from tutti.torch_private.fake_tensors import FakeTensorMode

# New objects between two collections. Graphs are many small permanent objects: with Python's own 700 up to
# a fifth of a compilation goes to collections.
_NUM_NEW = 20_000
# Processor seconds. A compilation of this length ends with a collection of its objects; shorter ones, and
# those within another one, share one after this total: a collection takes a tenth of a second, one of the
# whole process three. In a plan of many layouts it takes a second, so the next one waits `_TIMES` as long.
_LONG = 1.5
_TOGETHER = 8.0
_TIMES = 30.0
# PyTorch keeps the results of calls on fakes for the life of the process: some 200 a new length, 2 kB each.
MOST_FAKE_CALLS = 20_000
_spent = 0.0  # by short ones since the last collection of their objects
_pause = _TOGETHER  # the total until the next one
_depth = 0  # of nested compilations
_frozen_by_process = False


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Context with fewer collections, none of them over earlier objects (mostly imported modules), and one at
    the end of a long compilation, or of many, so that little garbage remains. It empties a large cache of
    PyTorch's calls on fakes.

    A disabled collector stays disabled, and objects that the process has frozen stay frozen.
    """
    global _spent, _pause, _depth
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
        if took > _LONG and _depth == 1:
            gc.collect()
            return
        _spent += took
        if _spent > _pause:
            if frozen_here:
                gc.unfreeze()
            begin = time.thread_time()
            gc.collect()
            _pause = max(_TOGETHER, _TIMES * (time.thread_time() - begin))
            _spent = 0.0
    finally:
        _depth -= 1
        if not _depth and FakeTensorMode.cache_info().size > MOST_FAKE_CALLS:
            FakeTensorMode.cache_clear()
        if frozen_here:
            gc.unfreeze()
        gc.set_threshold(first, *others)


def _is_frozen() -> bool:
    """Whether there are frozen objects: by an outer compilation, or by the process.

    It queries the process until the first positive answer: a count takes 20 ms for the objects of PyTorch.
    """
    global _frozen_by_process
    if not _depth and not _frozen_by_process:
        _frozen_by_process = gc.get_freeze_count() > 0
    return _depth > 0 or _frozen_by_process
