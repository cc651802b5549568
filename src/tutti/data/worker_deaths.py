"""The death of a worker, told where the loop waits for a batch.

PyTorch tells it by a `RuntimeError` from a handler of SIGCHLD, at whatever line the program is: in a save, in
a collective, at the end of the process. There it hides the cause, or is taken for another one. So the handler
waits until the loop asks for a batch; a loop that waits already learns of it at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

from tutti.data.worker_limits import check_descriptors, within_limits
from tutti.torch_private.worker_signals import is_of_data_loader


class _Postponed:
    """A handler of SIGCHLD that calls PyTorch's only within a wait.

    Args:
        handler: PyTorch's.
        previous: the one before it, which it calls, too.
    """

    def __init__(self, handler: Callable[..., Any], previous: Callable[..., Any] | None) -> None:
        self._handler, self._previous = handler, previous
        self._num_waits, self._came = 0, False

    def __call__(self, number: int, frame: Any) -> None:
        if self._num_waits:
            self._handler(number, frame)
            return
        self._came = True
        if self._previous is not None:
            self._previous(number, frame)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._num_waits += 1
        try:
            if self._came:
                self._came = False
                self._handler(signal.SIGCHLD, None)
            yield
        finally:
            self._num_waits -= 1


_with_workers: WeakSet[DataLoader[Any]] = WeakSet()  # that stay for the next loop


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """The iterator of a loader, whose workers start here. Raises `TuttiError`: the machine has no room."""
    before = signal.getsignal(signal.SIGCHLD)
    with within_limits():
        if loader not in _with_workers:
            check_descriptors(loader.num_workers)
        found = iter(loader)
    if loader.persistent_workers:
        _with_workers.add(loader)
    handler: Any = signal.getsignal(signal.SIGCHLD)
    if is_of_data_loader(handler) and threading.current_thread() is threading.main_thread():
        previous = before if callable(before) and before is not handler else None
        signal.signal(signal.SIGCHLD, _Postponed(handler, previous))
    return found


@contextmanager
def told_of_deaths() -> Iterator[None]:
    """Context of a wait for a batch.

    Raises:
        RuntimeError: PyTorch's, if a worker has died since the last wait, or dies in this one.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, _Postponed) and threading.current_thread() is threading.main_thread():
        with handler.waiting():
            yield
    else:
        yield
