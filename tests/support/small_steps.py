"""The usual training step around a loss, for tests that are about something else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.verification.verdict import Subject

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
    loss_of: Loss, model: nn.Module, optimizer: Any, batch: tuple[Tensor, ...], *layouts: str
) -> list[Program]:
    """Assert that each layout plays the same step and gathers no operand for want of a rule; its programs.

    The step is captured once for all of them.
    """
    programs = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", "data=2 splits"
        )  # how much of a step is split is no matter here
        warnings.filterwarnings("ignore", "[a-z]+=[0-9]+ splits nothing")
        subject = Subject(trained(loss_of), model, optimizer, batch)
        for layout in map(Layout.parse, layouts):
            program = subject.program(layout)
            assert program.fallbacks == [], str(layout)
            found = subject.verdict(layout, program=program)
            assert found.ok, str(found)
            programs.append(program)
    return programs
