"""Contracts of `torch_private/native_log.py`."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tutti.torch_private.native_log import native_warnings_off

# The warning comes at each thousandth block.
COUNT = 1001
WARNING = "Memory block of unknown size"


def free_under_the_profiler() -> None:
    """Free blocks that the profiler has not seen allocated."""
    blocks = [torch.ones(2) for _ in range(COUNT)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        blocks.clear()


@pytest.mark.parametrize("off", [False, True, False])
def test_warnings_are_off_inside_only(off: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with native_warnings_off() if off else contextlib.nullcontext():
        free_under_the_profiler()
    told = capfd.readouterr().err
    assert (WARNING in told) != off and "profiler_start" not in told
