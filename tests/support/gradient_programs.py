"""Programs for `as_eager`: a step around a loss, and one that looks at each parameter before the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from as_eager import Program
from small_steps import trained


def small_model() -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def losing(model: nn.Module, loss_of: Callable[[Any, Any], Any], optimizer: Any = None) -> Program:
    """The usual step around `loss_of(model, x)`."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    return trained(loss_of), model, optimizer, (torch.randn(8, 6),)


def losing_output(loss: Callable[[Tensor], Any], width: int = 4) -> Program:
    """The usual step of a linear layer around `loss(z)`, where z is (8, width)."""
    return losing(nn.Linear(6, width), lambda model, x: loss(model(x)))


def looking(model: nn.Module, look: Callable[[Any], Any], optimizer: Any = None) -> Program:
    """A step that calls `look(p)` for each parameter, which has a gradient."""

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            look(p)
        optimizer.step()
        return loss.detach()

    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    return step, model, optimizer, (torch.randn(8, 6),)
