"""Takes a step, and says what has been imported that only PyTorch's own compiler and exporter need."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import tutti

HEAVY = (
    "networkx",
    "torch.export._trace",
    "torch._inductor.codecache",
    "torch._functorch.aot_autograd",
)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def main() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [name for name in HEAVY if name in sys.modules]
    tutti.distribute(train_step, model, optimizer)(torch.ones(3, 4))
    print("before", *before)
    print("after", *(name for name in HEAVY if name in sys.modules))


main()
