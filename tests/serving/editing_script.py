"""A run with servers whose script does more than call its step: `editing_script.py FILE HOW`.

Worker 0 writes the losses and the last weights to FILE; without servers the only process does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import tutti

STEPS = 4


class Rotated(nn.Module):
    """Complex weights in the middle: their gradients are sums over samples that are complex, too."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8).double(), nn.Linear(8, 2).double()
        self.angle = nn.Parameter(torch.rand(8).double())

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        return self.out((torch.polar(torch.ones_like(self.angle), self.angle) * x).imag)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def distilling(teacher: nn.Module) -> Callable[..., Tensor]:
    def distill_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return distill_step


def edit(model: nn.Module, how: str) -> None:
    """What the script does between two calls."""
    weight = model.out.weight
    alone = how == "alone" and os.environ.get("TUTTI_ROLE") != "worker 1"
    if how == "whole" or alone:
        with tutti.whole(model), torch.no_grad():
            weight.mul_(0.5)
    elif how == "data":
        weight.data.clamp_(-0.1, 0.1)
    elif how == "loads":
        model.load_state_dict({n: x.clone() * 0.9 for n, x in model.state_dict().items()})
    elif how == "slots":
        with tutti.whole(model, slots=True):
            pass


def main(path: Path, how: str) -> None:
    torch.manual_seed(0)
    model, teacher = Rotated(), Rotated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.distribute(
        distilling(teacher) if how == "distills" else train_step, model, optimizer
    )
    losses = []
    for k in range(STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(k)).double()
        losses.append(step(x).item())
        if k == 1:
            edit(model, how)
    weights = {n: p.detach().reshape(-1).tolist() for n, p in model.named_parameters()}
    if os.environ.get("TUTTI_ROLE", "worker 0") == "worker 0":
        path.write_text(json.dumps([losses, weights]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
