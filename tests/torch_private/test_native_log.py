"""Contracts of `torch_private/native_log.py`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from forked import Forked
from tutti.torch_private.native_log import native_warnings_off

# The warning comes at each thousandth block that the profiler has not seen allocated.
COUNT = 1001
WARNING = "Memory block of unknown size"


def main() -> None:
    """Free blocks under profilers, of which the second may warn."""
    for off in (True, False, True):
        blocks = [torch.ones(2) for _ in range(COUNT)]
        print("off" if off else "on", file=sys.stderr, flush=True)
        with (
            native_warnings_off() if off else contextlib.nullcontext(),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True),
        ):
            blocks.clear()


def test_warnings_are_off_inside_only(tmp_path: Path) -> None:
    """In a process of its own: the profiler reads at its first start whether it tells its starts."""
    process = Forked([__file__], env=dict(os.environ), cwd=tmp_path)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0 and "profiler_start" not in told, told
    _, *parts = re.split(r"^(?:off|on)$", told, flags=re.MULTILINE)
    assert [WARNING in part for part in parts] == [False, True, False]


if __name__ == "__main__":
    main()
