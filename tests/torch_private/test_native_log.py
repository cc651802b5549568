"""Contracts of `torch_private/native_log.py`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from forked import Forked

# The warning comes at each thousandth block that the profiler has not seen allocated. A process of its own:
# the profiler reads at its first start whether it tells its starts.
SCRIPT = """
import contextlib, sys, torch
from torch.profiler import ProfilerActivity, profile
from tutti.torch_private.native_log import native_warnings_off

for off in (True, False, True):
    blocks = [torch.ones(2) for _ in range(1001)]
    print("off" if off else "on", file=sys.stderr, flush=True)
    with native_warnings_off() if off else contextlib.nullcontext():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            blocks.clear()
"""
WARNING = "Memory block of unknown size"


def test_warnings_are_off_inside_only(tmp_path: Path) -> None:
    script = tmp_path / "profiled.py"
    script.write_text(SCRIPT)
    process = Forked([script], env=dict(os.environ), cwd=tmp_path)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0 and "profiler_start" not in told, told
    _, first, second, third = re.split(r"^(?:off|on)$", told, flags=re.MULTILINE)
    assert [WARNING in part for part in (first, second, third)] == [False, True, False]
