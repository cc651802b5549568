"""Micro-batches hold the activations of one at a time: what a step takes falls with their number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti

WIDTH, DEPTH, ROWS = 32, 6, 4096


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def taken(layout: str) -> int:
    """Bytes at the peak of a step above weights and batch; those of the gradients are left out, too."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(DEPTH) for layer in (_linear, nn.GELU)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, ROWS, WIDTH)
    step = tutti.distribute(train_step, model, optimizer, layout)
    step(x, y)
    step.measure(x, y)
    assert step._last is not None and step._last.measured is not None
    return step._last.measured - sum(p.nbytes for p in model.parameters())


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def test_activations_fall_with_the_number_of_micro_batches() -> None:
    whole = taken("micro=1")
    assert whole > 2 * DEPTH * ROWS * WIDTH * 4  # two values a layer
    assert whole / taken("micro=8") > 4
    assert whole / taken("micro=32") == pytest.approx(32, rel=0.5)
