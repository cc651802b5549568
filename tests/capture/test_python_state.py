"""Counters in Python are refused, since a capture would stop them; modules keep no value of a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from small_steps import trained
from tutti.capture.step import capture
from tutti.errors import CaptureError

calls = 0
kept: list[Tensor] = []


class Keeping(nn.Module):
    """Remembers its last output, and its longest input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.seen, self.longest = torch.ones(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[1])
        self.seen = self.linear(x)
        self.fresh = self.seen
        return self.seen


def captured(step: Any, model: nn.Module) -> None:
    capture(step, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(8, 4),))


def counting_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    global calls
    calls += 1
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def keeping_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(loss.detach())
    return loss.detach()


@pytest.mark.parametrize(
    ("step", "name"), [(counting_step, "calls"), (keeping_step, r"len\(kept\)")]
)
def test_what_a_step_reaches_by_name(step: Any, name: str) -> None:
    with pytest.raises(CaptureError, match=f"changes {name} in Python"):
        captured(step, nn.Linear(4, 2))


def test_a_number_that_is_set_once_is_no_counter() -> None:
    longest = 0

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        nonlocal longest
        longest = max(longest, x.shape[1])
        return trained(lambda model, x: model(x).square().mean())(model, optimizer, x)

    captured(step, nn.Linear(4, 2))
    assert longest == 4


def test_modules_keep_no_value_of_a_trace() -> None:
    model = Keeping()
    seen = model.seen
    captured(trained(lambda model, x: model(x).square().mean()), model)
    assert model.seen is seen and not hasattr(model, "fresh")
