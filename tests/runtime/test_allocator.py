"""Freed memory is kept: later steps touch no fresh pages; and left alone when that is asked for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Training steps with activations of 8 to 32 MB and gradients of other sizes; prints how many pages a step
# touches for the first time, once it is warm. A block of them may grow once: that is why the median.
SCRIPT = """
import resource, statistics, torch, tutti
torch.set_num_threads(1)
widths = (64, 128, 256, 128, 64)
layers = [torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:])]
model = torch.nn.Sequential(*layers)

def train(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

step = tutti.distribute(train, model, torch.optim.SGD(model.parameters(), 0.01))
x = torch.randn(32768, 64)
touched = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x)
    touched.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(statistics.median(touched[3:])))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_later_steps_touch_few_fresh_pages() -> None:
    kept, given_back = (_faults(TUTTI_KEEP_MEMORY=word) for word in ("1", "0"))
    assert kept < 0.3 * given_back


def _faults(**options: str) -> int:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MALLOC_")} | options
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
