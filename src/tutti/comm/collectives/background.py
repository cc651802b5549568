"""Collectives that overlap the computation, in the order in which the program starts them.

On CPUs one thread runs them: Gloo releases the GIL while it waits for its sockets. On GPUs a separate stream
runs them. A blocking collective goes through the same queue, so all ranks run them in one order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Work = Callable[[], list[Tensor]]


@dataclass
class Underway:
    """A collective in flight; on a GPU with the event that its stream records at its end."""

    future: Future[list[Tensor]] | None = None
    results: list[Tensor] | None = None
    event: Any = None


_at_once = False


@contextlib.contextmanager
def in_calling_thread() -> Iterator[None]:
    """Within it collectives of CPU tensors end where they start: this thread's profiler sees their memory."""
    global _at_once
    before, _at_once = _at_once, True
    try:
        yield
    finally:
        _at_once = before


class Background:
    """One queue of collectives, for CPU and for CUDA tensors."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}
        self._pending = 0

    def start(self, move: Work, operands: Sequence[Tensor], *, alike: bool = False) -> Underway:
        """Begin `move()`; its `operands` must stay as they are until `finish`.

        alike: all ranks of the group run the same program, so none waits for another before its own start.
        """
        device = operands[0].device
        if device.type == "cuda":
            return self._start_on_stream(move, operands, device)
        if _at_once and alike and not self._pending:
            return Underway(results=move())
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tutti-collectives")
        self._pending += 1
        return Underway(self._thread.submit(_plain, move))

    def finish(self, underway: Underway) -> list[Tensor]:
        """The results; raises what the collective raised."""
        if underway.future is not None:
            self._pending -= 1
            return underway.future.result()
        assert underway.results is not None
        if underway.event is None:
            return underway.results
        now = torch.cuda.current_stream(underway.results[0].device)
        now.wait_event(underway.event)
        for x in underway.results:
            x.record_stream(now)
        return underway.results

    def in_turn(self, move: Work) -> list[Tensor]:
        """The results of `move()`, run after all collectives in flight."""
        if self._thread is None or not self._pending:
            return move()
        return self._thread.submit(_plain, move).result()

    def _start_on_stream(
        self, move: Work, operands: Sequence[Tensor], device: torch.device
    ) -> Underway:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            results = move()
            event = stream.record_event()
        for x in operands:
            x.record_stream(stream)
        return Underway(results=results, event=event)


def _plain(move: Work) -> list[Tensor]:
    with torch.no_grad():  # a setting of each thread
        return move()
