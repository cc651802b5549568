"""A training script in which something goes wrong on one rank: `causes.py CAUSE RANK DIRECTORY STEPS`.

Every rank notes its process in DIRECTORY. Without an end (STEPS is 0) ranks go on until something ends them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from processes import wait_until_asleep
from torch import Tensor, nn

import tutti

CAUSE, WHERE, DIRECTORY, STEPS = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
RANK, BAD_STEP = int(os.environ["RANK"]), 3


def signaled(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fails() -> None:
    raise ValueError("a batch of the wrong kind")


def fails_while_the_other_waits() -> None:
    wait_until_asleep([int((DIRECTORY / f"rank{1 - RANK}.pid").read_text())])
    fails()


def runs_out_of_memory() -> None:
    raise MemoryError("no room for a list")


CAUSES: dict[str, Callable[[], object]] = {
    "exception": fails,
    "exception in a wait": fails_while_the_other_waits,
    "MemoryError": runs_out_of_memory,
    "SIGKILL": signaled(signal.SIGKILL),
    "SIGSTOP": signaled(signal.SIGSTOP),
    "SIGTERM": signaled(signal.SIGTERM),
    "segfault": lambda: ctypes.string_at(0),
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(3),
    "sleep": lambda: time.sleep(1000),
}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def main() -> None:
    (DIRECTORY / f"rank{RANK}.pid").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(12, 4), torch.randn(12, 3)
    for k in itertools.count() if not STEPS else range(STEPS):
        if k == BAD_STEP:
            print(f"rank {RANK} at step {k}", flush=True)
            if str(RANK) == WHERE:
                CAUSES[CAUSE]()  # here it goes wrong
                time.sleep(1000 if CAUSE == "SIGTERM" else 0)  # until the signal is taken
        step(x, y)
        time.sleep(0.02 if STEPS == 0 else 0)


main()
