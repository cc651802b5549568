"""Measures the peak memory of a call above the memory held before it, by its allocator's counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tutti.comm.collectives.background import in_calling_thread
from tutti.errors import TuttiError
from tutti.torch_private.native_log import native_warnings_off
from tutti.torch_private.profilers import profiler_is_used

# How the profiler calls the record of one allocation (bytes above 0) or release (below).
_EVENT = "[memory]"


def peak_nbytes(call: Callable[[], Any], device: torch.device | str = "cpu") -> tuple[int, Any]:
    """Bytes at the peak of `call()` above those held when it began, and its result.

    On a GPU, the count of PyTorch's caching allocator. On a CPU, the sum over every allocation and release
    that PyTorch's allocator reports: without the libraries' own memory, and without the noise of resident
    pages. It reports the calling thread only, so collectives that overlap the computation run there
    meanwhile. It does not report releases by a thread of Gloo, so a call with collectives may sometimes
    seem to take more than it does.

    Raises:
        TuttiError: on a CPU, inside of a profiler: a second one would end it, and its events would be lost.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, result
    if profiler_is_used():
        raise TuttiError(
            "cannot measure the memory of a call inside of PyTorch's profiler",
            why="the measurement is a profiler, too, and would end the one that is on",
            fix="measure before the block of the profiler, or after it",
        )
    cpu = [ProfilerActivity.CPU]
    with (
        native_warnings_off(),
        in_calling_thread(),
        profile(activities=cpu, profile_memory=True, acc_events=True) as seen,
    ):
        result = call()
    return _highest(seen), result


def _highest(seen: profile) -> int:
    found: Any = seen.profiler
    events = [e for e in found.kineto_results.events() if e.name() == _EVENT]
    now = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest
