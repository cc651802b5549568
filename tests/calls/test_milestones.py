"""A scheduler with milestones that the step calls: the counts between them share a program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR

import tutti

MILESTONES = [2, 4, 4, 9]
CALLS = 14


def _rates_and_weights(layout: str | None) -> tuple[list[float], Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = MultiStepLR(optimizer, MILESTONES, gamma=0.5)
    milestones = scheduler.milestones

    def train(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    step: Any = train
    if layout is not None:
        step = tutti.distribute(train, model, optimizer, layout)
    rates = []
    for k in range(CALLS):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(k)).double()
        step(x) if layout is not None else step(model, optimizer, x)
        rates.append(optimizer.param_groups[0]["lr"])
    assert scheduler.milestones is milestones
    return rates, model.weight.detach(), step


def test_a_step_is_traced_once_for_all_counts_between_milestones() -> None:
    expected, weight, _ = _rates_and_weights(None)
    rates, found, step = _rates_and_weights("")
    assert rates == expected
    torch.testing.assert_close(found, weight, rtol=1e-12, atol=1e-12)
    assert step._num_traces <= 2 + len({*MILESTONES})
