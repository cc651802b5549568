"""Numbers that change between calls are inputs of the graph; branches on them are guarded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti


def _weighted(model: nn.Module, optimizer: Any, x: Tensor, weight: float) -> Tensor:
    loss = model(x).square().mean() * weight
    if weight > 0.5:
        loss = loss * 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def _pair(make: Any) -> tuple[tutti.Step, nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    twin = copy.deepcopy(model)
    step = tutti.distribute(_weighted, model, make(model.parameters()), "")
    return step, twin, make(twin.parameters())


def _num_traces(step: tutti.Step) -> int:
    return sum(map(len, step._programs.known.by_key.values()))


def test_a_float_of_the_batch_is_an_input_and_a_branch_on_it_traces_again() -> None:
    step, twin, optimizer = _pair(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5))
    x = torch.randn(8, 4)
    for weight, traces in ((0.1, 1), (0.2, 1), (0.9, 2), (0.3, 2), (0.7, 2)):
        loss = step(x, weight)
        assert float(loss) == pytest.approx(float(_weighted(twin, optimizer, x, weight)), rel=1e-5)
        assert _num_traces(step) == traces


@pytest.mark.parametrize("lr", [1, 0.05, torch.tensor(0.05)])
def test_lr_may_be_a_whole_number_or_a_tensor(lr: Any) -> None:
    step, twin, optimizer = _pair(lambda p: torch.optim.SGD(p, lr=lr))
    x = torch.randn(8, 4)
    for k in range(3):
        loss = step(x, 0.2)
        assert float(loss) == pytest.approx(float(_weighted(twin, optimizer, x, 0.2)), rel=1e-5)
        for one in (step.optimizer, optimizer):
            one.param_groups[0]["lr"] = 0.5 / (k + 1)
    assert _num_traces(step) == 1


def test_another_option_of_the_optimizer_traces_again() -> None:
    step, twin, optimizer = _pair(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5))
    x = torch.randn(8, 4)
    step(x, 0.2)
    _weighted(twin, optimizer, x, 0.2)
    for one in (step.optimizer, optimizer):
        one.param_groups[0]["nesterov"] = True
    for _ in range(2):
        loss = step(x, 0.2)
        assert float(loss) == pytest.approx(float(_weighted(twin, optimizer, x, 0.2)), rel=1e-5)
    assert _num_traces(step) == 2
