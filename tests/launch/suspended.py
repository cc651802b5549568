"""A run of which one rank or all (a laptop that sleeps) are suspended for longer than its timeout."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import forked

SCRIPT = """
import os, pathlib, time
import torch, torch.nn as nn, tutti
def train_step(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss
torch.manual_seed(0)
model = nn.Linear(4, 4)
step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), 0.1))
here = pathlib.Path(os.environ["HERE"])
for k in range(400):
    step(torch.ones(4, 4))
    if k == 5:
        (here / ("pid" + os.environ["RANK"])).write_text(str(os.getpid()) + " ")
    time.sleep(0.01)
print("played to the end")
"""

Ended = tuple[int | None, str, str]  # the exit code, and what it prints
# Longer than a rank that a busy machine keeps waiting.
TIMEOUT_SECONDS = 10


def suspended(tmp_path: Path, ranks: list[int]) -> Ended:
    """A run whose `ranks` are stopped for twice its timeout: how it ends, and what it prints."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HERE": str(tmp_path)}
    env["TUTTI_TIMEOUT"] = str(TIMEOUT_SECONDS)
    words = ["-m", "tutti", "run", "-n", "2", "--layout", "data=2", str(script)]
    process = forked.Forked(words, env=env, cwd=tmp_path)
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    until = time.monotonic() + 90
    while not all(f.exists() and f.read_text().endswith(" ") for f in files):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    pids = [int(files[rank].read_text()) for rank in ranks]
    if len(ranks) == 2:  # the whole machine: the launcher, too
        pids.append(process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * TIMEOUT_SECONDS)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err
