"""Contracts of `torch_private/profilers.py`."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tutti.torch_private.profilers import profiler_is_used


def test_a_profiler_is_used_from_its_start_to_its_end() -> None:
    assert not profiler_is_used()
    with profile(activities=[ProfilerActivity.CPU]):
        assert profiler_is_used()
    assert not profiler_is_used()
    with torch.autograd.profiler.profile():
        assert profiler_is_used()
    assert not profiler_is_used()


def test_a_profiler_that_waits_is_used() -> None:
    plan = schedule(wait=1, warmup=1, active=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as waiting:
        for _ in range(3):
            assert profiler_is_used()
            waiting.step()
    assert not profiler_is_used()
