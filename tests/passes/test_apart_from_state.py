"""Slots and results with values of a weight, where ranks share the memory of the weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from as_eager import Program, assert_as_eager_on_ranks
from ranks import Ranks


class WithCopies(torch.optim.Optimizer):
    """SGD that keeps the weight before its decay, and draws it towards the one of the step before."""

    def __init__(self, params: Any, decay: float) -> None:
        super().__init__(params, {"lr": 0.1, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                if "before" not in slots:
                    slots["before"] = p.clone()
                p.add_(p.grad, alpha=-group["lr"])
                p.lerp_(slots["before"], 0.3)
                slots["before"].copy_(p)
                p.mul_(1 - group["decay"])


def _program(decay: float, *, returns: bool = False) -> Program:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not returns:
            return loss
        found = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
        return loss, found

    return step, model, WithCopies(model.parameters(), decay), (torch.randn(8, 6),)


def a_slot_equal_to_the_weight() -> Program:
    return _program(0.0)


def a_slot_before_the_last_change() -> Program:
    return _program(0.1)


def a_result_before_the_last_change() -> Program:
    return _program(0.1, returns=True)


PROGRAMS = [
    a_slot_equal_to_the_weight,
    a_slot_before_the_last_change,
    a_result_before_the_last_change,
]


@pytest.mark.parametrize(
    "layout", ["data=2 zero=1", "data=2 zero=2 micro=2", "data=2 zero=3", "data=2 zero=3 micro=2"]
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_on_one_device(ranks: Ranks, program: Callable[[], Program], layout: str) -> None:
    assert_as_eager_on_ranks(ranks, program, layout, calls=5)
