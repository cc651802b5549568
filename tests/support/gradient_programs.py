"""Steps that look at each parameter between the backward and the update, for `as_eager`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from as_eager import Program


def small_model() -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


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
