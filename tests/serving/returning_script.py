"""A run with servers that loads an earlier checkpoint: `returning_script.py DIRECTORY returns`.

Worker 1 is late. DIRECTORY/workerN.txt has the losses of the steps after the load, and whether the state was
that of the checkpoint right after it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader

import tutti

SAVED, STEPS = 3, 6


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def batch_at(k: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(k)).double()


def main(directory: Path, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = tutti.distribute(train_step, model, optimizer)
    who = os.environ.get("TUTTI_ROLE", "one").replace(" ", "")
    late = 0.1 * (who == "worker1")

    def run(begin: int, end: int) -> list[float]:
        losses = []
        for k in range(begin, end):
            time.sleep(late)
            losses.append(step(batch_at(k)).item())
        return losses

    run(0, SAVED)
    step.save(directory / "saved")
    if how == "returns":
        run(SAVED, STEPS)
        step.load(directory / "saved")
        time.sleep(0.0 if late else 0.6)  # a gradient that is under way arrives
        found = step.state_dict()
        saved = {n: torch.zeros_like(x) for n, x in found.items()}
        state_dict_loader.load(saved, checkpoint_id=str(directory / "saved"))
        same = all(torch.equal(x, found[n]) for n, x in saved.items())
        time.sleep(15 * late)
    else:
        same = True
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    losses = run(SAVED, STEPS)
    (directory / f"{who}.txt").write_text(" ".join([str(same), *map(repr, losses)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
