"""Small steps for tests of pipelines on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti


class Spoil(nn.Module):
    """Divides zero by zero in the rows whose first entry is large."""

    def forward(self, x: Tensor) -> Tensor:
        zero = (x[:, :1] < 100).to(x.dtype)
        return x * zero / zero  # spoiled here


def mlp(*, spoiled: bool = False) -> nn.Module:
    """Four layers, 16 wide, in float64; the same at every call."""
    torch.manual_seed(0)
    between = [Spoil()] if spoiled else []
    layers = nn.Linear(16, 16), nn.ReLU(), *between, nn.Linear(16, 16), nn.Linear(16, 8)
    return nn.Sequential(*layers).double()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Forward, backward, update."""
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def data() -> tuple[Tensor, Tensor]:
    """Sixteen rows and their classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 16, generator=generator).double(), torch.arange(16) % 8


def distributed(layout: str, **options: Any) -> tutti.Step:
    """`train_step` on the MLP."""
    model = mlp(spoiled=options.pop("spoiled", False))
    return tutti.distribute(
        train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), layout, **options
    )
