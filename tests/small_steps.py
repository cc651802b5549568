"""The usual training step around a loss, for tests that are about something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Loss = Callable[..., Tensor]


def trained(loss_of: Loss) -> Callable[..., Tensor]:
    """Loss of the model and the batch, backward, update."""

    def train_step(model: nn.Module, optimizer: Any, *batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """A loss of the model's output alone."""
    return model(x).square().mean()


step = trained(squares)
