"""Keeps reads of a thread's stack out of the traces that it makes.

A frame that another thread holds keeps its variables, after its function has returned too. PyTorch asks in a
trace whether anything else refers to a tensor: autograd copies a gradient that has another holder, and makes
other views. So the trace of one rank would differ from that of the others.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_lock = threading.RLock()


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Context for a trace: tutti's threads read no stack meanwhile. It begins once a current read is over."""
    with _lock:
        yield


@contextlib.contextmanager
def reading() -> Iterator[bool]:
    """Context for another thread's read, false during a trace: then it reads nothing.

    Drop the frames inside.
    """
    held = _lock
    free = held.acquire(blocking=False)
    try:
        yield free
    finally:
        if free:
            held.release()


def _renew() -> None:
    """Free the lock in a forked child, which lacks the thread that may hold it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)
