"""A training script for runs with servers: `served_script.py DIRECTORY STEPS WRONG`.

Every process writes down what it sees: DIRECTORY/worker0.txt has a line for each step. WRONG is the process
that fails before its first step; with ":K" (several with commas between), those that do nothing after K
steps until the file DIRECTORY/go is there, with "-K" those that end well after K steps, and with "!K" those
that fail then.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import tutti

# Where there is an axis tensor.
PLACE = {"1.weight": "tensor, -", "4.weight": "-, tensor"}


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(x), y, ignore_index=-1)
    optimizer.zero_grad()
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss, norm


def eval_step(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)
    model = nn.Sequential(
        nn.Embedding(12, 8), nn.Linear(8, 16, bias=False), norm, nn.Dropout(0.2), nn.Linear(16, 5)
    )
    model = model.double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch_at(k: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(k)
    x, y = torch.randint(12, (12,), generator=g), torch.randint(5, (12,), generator=g)
    y[:5:2] = -1
    return x, y


def main(directory: Path, steps: int, wrong: str) -> None:
    who = os.environ.get("TUTTI_ROLE", "one").replace(" ", "")
    model, optimizer = make()
    step = tutti.distribute(train_step, model, optimizer, place=PLACE)
    look = tutti.distribute(eval_step, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if wrong == who:
        raise ValueError("something is wrong here")
    with open(directory / f"{who}.txt", "a", buffering=1) as file:
        file.write(f"pid {os.getpid()}\n")
        for k in range(steps):
            while f"{who}:{k}" in wrong.split(",") and not (directory / "go").exists():
                time.sleep(0.02)
            if f"{who}-{k}" in wrong.split(","):
                sys.exit(0)
            if f"{who}!{k}" in wrong.split(","):
                raise ValueError("a bad record")
            loss, norm = step(*batch_at(k))
            schedule.step()
            file.write(f"step {k} {loss.item()!r} {norm.item()!r}\n")
        file.write(f"eval {look(batch_at(0)[0]).item()!r}\n")
    state = step.state_dict()
    whole = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in state.items()}
    torch.save(whole, directory / f"{who}.pt")
    step.save(directory / "checkpoint")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
