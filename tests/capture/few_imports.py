"""Takes a step, and says what has been imported that only PyTorch's own compiler and exporter need."""

from __future__ import annotations

import sys

import torch
from torch import nn

import tutti
from small_steps import step

HEAVY = (
    "networkx",
    "torch.export._trace",
    "torch._inductor.codecache",
    "torch._functorch.aot_autograd",
)


def main() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [name for name in HEAVY if name in sys.modules]
    tutti.distribute(step, model, optimizer)(torch.ones(3, 4))
    print("before", *before)
    print("after", *(name for name in HEAVY if name in sys.modules))


main()
