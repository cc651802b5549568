"""Slots of two optimizers of one parameter, and slots that are called as an option: names would clash."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import tutti
from small_steps import trained
from tutti.errors import CaptureError


def both(model: nn.Module, optimizers: list[Optimizer], x: Tensor) -> Tensor:
    for one in optimizers:
        one.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        one.step()
    return loss.detach()


def alone(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    return both(model, [optimizer], x)


def begun(kind: Any, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False).double()
    return model, [kind(model.parameters(), lr=0.1, **options) for _ in range(2)]


BATCHES = [torch.randn(4, 4, dtype=torch.float64) for _ in range(4)]


@pytest.mark.parametrize("layout", ["", "data=2"])
def test_two_optimizers_with_slots_of_one_parameter_are_refused(layout: str) -> None:
    model, optimizers = begun(torch.optim.Adam)
    with pytest.raises(
        CaptureError, match=r"two optimizers of the step keep .* of the parameter weight"
    ):
        tutti.verify(both, model, optimizers, (BATCHES[0],), layout)
    step = tutti.distribute(both, model, optimizers)
    with pytest.raises(CaptureError, match="a distributed step for each optimizer"):
        for x in BATCHES:
            step(x)


def test_two_without_slots_play() -> None:
    losses = []
    for plays in (False, True):
        model, optimizers = begun(torch.optim.SGD)
        step: Any = tutti.distribute(both, model, optimizers) if plays else None
        losses.append([float(step(x) if plays else both(model, optimizers, x)) for x in BATCHES])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_step_for_each_optimizer_is_as_eager() -> None:
    """What the refusal advises."""
    losses = []
    for plays in (False, True):
        model, optimizers = begun(torch.optim.Adam)
        steps: list[Any] = [
            tutti.distribute(alone, model, one)
            if plays
            else (lambda x, m=model, o=one: alone(m, o, x))
            for one in optimizers
        ]
        losses.append([float(step(x)) for x in BATCHES for step in steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


class Heavy(Optimizer):
    """Keeps a slot that is called as an option of its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                slots.setdefault("momentum", torch.zeros_like(p))
                slots["momentum"].mul_(group["momentum"]).add_(p.grad)
                p.sub_(group["lr"] * slots["momentum"])


@trained
def summed(model: Any, x: Tensor) -> Tensor:
    return sum((x @ w).square().mean() for w in model.parameters())


def test_a_slot_that_is_called_as_an_option_is_refused() -> None:
    named = nn.ParameterDict({"a": torch.ones(4, 4).double(), "b": torch.ones(4, 4).double()})
    assert tutti.verify(summed, named, Heavy(named.parameters()), (BATCHES[0],), "data=2").ok
    listed = nn.ParameterList([torch.ones(4, 4).double(), torch.ones(4, 4).double()])
    with pytest.raises(CaptureError, match="keeps momentum of the parameter 0, and has an option"):
        tutti.verify(summed, listed, Heavy(listed.parameters()), (BATCHES[0],), "data=2")
