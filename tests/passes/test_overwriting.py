"""In a run only what a step updates is overwritten, and only where nobody else looks at it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from small_steps import step as train_step


class Doubled(nn.Module):
    """Every parameter is the first operand of an op of its own shape, which could overwrite it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * 2 + self.frozen.mul(3) + self.table.mul(5))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {n: v.clone() for n, v in model.state_dict().items()}


def test_evaluation_changes_nothing() -> None:
    model, x = Doubled(), torch.randn(2, 4)
    evaluate = tutti.distribute(lambda m, x: m(x), model)
    before = _state(model)
    first = evaluate(x)
    assert torch.equal(evaluate(x), first)
    for name, value in _state(model).items():
        assert torch.equal(value, before[name]), name


def test_training_changes_what_the_optimizer_updates_and_nothing_else() -> None:
    torch.manual_seed(0)
    model, x = Doubled(), torch.randn(2, 4)
    held = model.weight
    optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    step = tutti.distribute(train_step, model, optimizer)
    before = _state(model)
    step(x)
    address = model.weight.data_ptr()
    step(x)
    after = _state(model)
    assert not torch.equal(after["weight"], before["weight"])
    assert torch.equal(after["frozen"], before["frozen"])
    assert torch.equal(after["table"], before["table"])
    assert model.weight is held and model.weight.data_ptr() == address


def test_a_buffer_that_follows_a_weight_keeps_its_own_value() -> None:
    """Its new value is the weight's old one: the two must not come to share memory."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    model.register_buffer("last", model.weight.detach().clone())

    def train(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.last.copy_(model.weight)  # type: ignore[operator, union-attr]
        return train_step(model, optimizer, x)

    step = tutti.distribute(train, model, torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.randn(2, 4)
    step(x)
    for _ in range(3):
        weight = model.weight.detach().clone()
        step(x)
        assert torch.equal(model.last, weight)  # type: ignore[arg-type]
        assert not torch.equal(model.weight, weight)


@pytest.mark.parametrize("name", ["weight", "frozen"])
def test_what_the_user_holds_is_seen_to_change_as_in_eager_code(name: str) -> None:
    model, x = Doubled(), torch.randn(2, 4)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    step = tutti.distribute(train_step, model, optimizer)
    step(x)
    view = getattr(model, name).detach()
    step(x)
    assert torch.equal(view, getattr(model, name))
