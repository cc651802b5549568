"""The usual training step around a loss, for tests that are about something else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import tutti
from tutti.partition.partition import Program

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


def same_step(
    loss_of: Loss, model: nn.Module, optimizer: Any, batch: tuple[Tensor, ...], layout: str
) -> Program:
    """Assert that `layout` plays the same step and gathers no operand for want of a rule; its program."""
    train_step = trained(loss_of)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", "data=2 splits"
        )  # how much of a step is split is no matter here
        found = tutti.verify(train_step, model, optimizer, batch, layout)
    assert found.ok, str(found)
    program = tutti.distribute(train_step, model, optimizer, layout).program_of(batch)
    assert program.fallbacks == []
    return program
