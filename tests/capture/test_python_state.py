"""Counters in Python are refused, since a capture would stop them; modules keep no value of a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from small_steps import step
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


def captured(train_step: Any, model: nn.Module) -> None:
    capture(train_step, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(8, 4),))


def counting_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    global calls
    calls += 1
    return step(model, optimizer, x)


def keeping_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = step(model, optimizer, x)
    kept.append(loss)
    return loss


@pytest.mark.parametrize(
    ("counting", "name"), [(counting_step, "calls"), (keeping_step, r"len\(kept\)")]
)
def test_what_a_step_reaches_by_name(counting: Any, name: str) -> None:
    with pytest.raises(CaptureError, match=f"changes {name} in Python"):
        captured(counting, nn.Linear(4, 2))


def test_a_number_that_is_set_once_is_no_counter() -> None:
    longest = 0

    def measuring_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        nonlocal longest
        longest = max(longest, x.shape[1])
        return step(model, optimizer, x)

    captured(measuring_step, nn.Linear(4, 2))
    assert longest == 4


def test_modules_keep_no_value_of_a_trace() -> None:
    model = Keeping()
    seen = model.seen
    captured(step, model)
    assert model.seen is seen and not hasattr(model, "fresh")
