"""A training script whose last rank is killed between two steps: `killed.py DIRECTORY`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from processes import wait_until_asleep
from torch import Tensor, nn

import tutti

RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BAD_STEP = 3


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)  # train_step begins
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss  # train_step ends


def main() -> None:
    """Steps without end, but for the one at which the last rank dies."""
    noted = [Path(sys.argv[1]) / f"rank{rank}.pid" for rank in range(NUM_RANKS)]
    noted[RANK].write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.distribute(train_step, model, optimizer)
    x, y = torch.randn(12, 16), torch.randint(0, 8, (12,))
    while True:
        if step.num_steps == BAD_STEP:
            print(f"rank {RANK} at step {BAD_STEP}", flush=True)
            if RANK == NUM_RANKS - 1:
                wait_until_asleep([int(path.read_text()) for path in noted[:RANK]])
                os.kill(os.getpid(), signal.SIGKILL)
        step(x, y)


main()
