"""A training script of which one rank is lost; the others write their weights.

    lost.py RANK DIRECTORY [save | late | stop | leave]

The rank is killed at a step; with "save" while all save after the last step, when some have written their
shards; with "late" just before that save; with "stop" it stops (SIGSTOP) at that step, after a first save;
with "leave" it ends well there.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from tutti.checkpoint import files
from tutti.state.residence import whole_of

RANK, VICTIM = int(os.environ["RANK"]), int(sys.argv[1])
BAD_STEP, STEPS = 5, 12
MODE = "".join(sys.argv[3:])
IN_SAVE, LATE, STOPS = MODE == "save", MODE == "late", MODE == "stop"
LEAVES = MODE == "leave"


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def main() -> None:
    """All steps but for the victim."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(12, 4), torch.randn(12, 3)
    for k in range(STEPS):
        if k == BAD_STEP and RANK == VICTIM and not (IN_SAVE or LATE):
            if LEAVES:
                sys.exit(0)
            os.kill(os.getpid(), signal.SIGSTOP if STOPS else signal.SIGKILL)
        step(x, y)
        if k == 1 and STOPS:
            step.save(Path(sys.argv[2]) / "saved")
    weights = torch.cat([whole_of(p).detach().reshape(-1) for p in model.parameters()])
    (Path(sys.argv[2]) / f"{RANK}.txt").write_text(" ".join(map(str, weights.tolist())))
    if IN_SAVE and RANK == VICTIM:
        files.digest_of = lambda file: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    if LATE and RANK == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    step.save(Path(sys.argv[2]) / "saved")


main()
