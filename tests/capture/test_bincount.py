"""Counts of values with a `minlength`, as in the load of experts and in metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import small_model
from ranks import Ranks


class Router(nn.Module):
    """Two of four experts for each row, with a loss for even loads and a bias that evens them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.load = nn.Buffer(torch.zeros(4))
        self.bias = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = (probabilities + self.bias).topk(2, -1)
        count = torch.bincount(chosen.flatten(), minlength=4)
        total = torch.bincount(chosen.flatten(), weights.detach().flatten(), minlength=4)
        self.load += count
        self.bias += 0.1 * torch.sign(count.double().mean() - count)
        loss = (count / count.sum() * probabilities.mean(0)).sum()
        parts = [
            expert(x) * (weights * (chosen == k)).sum(-1, keepdim=True)
            for k, expert in enumerate(self.experts)
        ]
        return sum(parts, x).square().mean() + loss, total


def routed() -> Program:
    model = Router()

    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        loss, total = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, total, model.load.clone()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return step, model, optimizer, (torch.randn(8, 6),)


@pytest.mark.parametrize("layout", ["data=2 zero=2", "tensor=2"])
def test_loads_of_experts(layout: str) -> None:
    assert_as_eager(routed, layout)


def test_loads_of_experts_on_ranks(ranks: Ranks) -> None:
    assert_as_eager_on_ranks(ranks, routed, "data=2")


def counting(minlength: int) -> Any:
    def step(model: Any, x: Tensor, index: Tensor) -> Tensor:
        return model(x).sum() * torch.bincount(index, minlength=minlength)

    return tutti.distribute(step, small_model(), None, "")


def test_a_value_above_the_counts_is_an_error_of_the_call() -> None:
    step, x = counting(3), torch.randn(4, 6)
    assert len(step(x, torch.tensor([0, 2, 2, 1]))) == 3
    with pytest.raises(IndexError, match=r"minlength=3\) of a value of 5"):
        step(x, torch.tensor([0, 5, 2, 1]))
    assert len(step(x, torch.tensor([0, 0, 0, 0]))) == 3


def test_counts_without_a_known_number_are_refused() -> None:
    with pytest.raises(tutti.CaptureError, match="depends on values") as caught:
        counting(0)(torch.randn(4, 6), torch.tensor([0, 2, 2, 1]))
    assert "minlength" in caught.value.fix
