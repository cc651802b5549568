"""A training script in which rank 1 comes late to a step: `late.py HOW DIRECTORY`.

HOW is sleep (until DIRECTORY/go is there), stop (SIGSTOP until somebody goes on with it) or deaf (in native
code that keeps Python to itself for so many seconds).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from tutti.launch import waits

HOW, DIRECTORY = sys.argv[1], Path(sys.argv[2])
RANK, BAD_STEP, STEPS = int(os.environ["RANK"]), 3, 6


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def reads_a_batch() -> None:
    while not (DIRECTORY / "go").exists():
        time.sleep(0.05)  # rank 1 is here


def come_late() -> None:
    if HOW == "sleep":
        reads_a_batch()
    elif HOW == "stop":
        (DIRECTORY / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        until = time.monotonic() + float(HOW)
        while time.monotonic() < until:
            ctypes.PyDLL(None).sleep(int(until - time.monotonic()) + 1)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(12, 4), torch.randn(12, 3)
    for k in range(STEPS):
        if k == BAD_STEP:
            waits.LEAST_SECONDS = 1.0  # the first step may take longer on a busy machine
            if RANK == 1:
                come_late()
        step(x, y)
    print(f"rank {RANK} done", flush=True)


main()
