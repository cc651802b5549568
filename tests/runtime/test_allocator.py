"""Freed memory is kept: later steps touch no fresh pages; and left alone when that is asked for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Steps that make and drop 40 MB; prints the pages that the last of them touched for the first time.
SCRIPT = """
import resource, torch, tutti
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(10)))
step = tutti.distribute(lambda m, x: m(x).sum(), model)
x = torch.randn(16384, 64)
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_a_later_step_touches_no_fresh_pages() -> None:
    kept, given_back = (_faults(TUTTI_KEEP_MEMORY=word) for word in ("1", "0"))
    assert kept < 200
    assert given_back > 10 * kept + 1000


def _faults(**options: str) -> int:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MALLOC_")} | options
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
