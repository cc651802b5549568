"""A model and its optimizers copied whole."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import tutti
from small_steps import squares, trained
from tutti.verification.copies import copies_of


class Lion(torch.optim.Optimizer):
    """As many write it: what its step needs are attributes of its own."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.beta, self.rule = 0.9, {"decay": 0.1}
        self.lock = threading.Lock()
        self.ready: list[Tensor] = self.param_groups[0]["params"][:1]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                slots = self.state[p]
                if not slots:
                    slots["mean"] = torch.zeros_like(p)
                mean = slots["mean"]
                p.mul_(1 - group["lr"] * self.rule["decay"])
                p.sub_(mean.lerp(p.grad, 1 - self.beta).sign(), alpha=group["lr"])
                mean.lerp_(p.grad, 0.01)


class Around(torch.optim.Optimizer):
    """Another optimizer inside, as of Lookahead and SAM."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups
        self.state = base.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def made() -> tuple[Any, Lion]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, Lion(model.parameters())


def test_own_attributes_are_kept_and_what_is_the_models_is_the_copys() -> None:
    model, optimizer = made()
    model[0].weight.no_decay = True  # type: ignore[assignment]
    model.held_by = optimizer  # type: ignore[assignment]
    other: Any
    other, copied = copies_of(model, optimizer)
    assert (
        copied.beta == 0.9 and copied.rule == {"decay": 0.1} and copied.rule is not optimizer.rule
    )
    assert copied.defaults == optimizer.defaults and copied.lock is optimizer.lock
    assert copied.ready[0] is other[0].weight and other.held_by is copied
    assert [id(p) for p in copied.param_groups[0]["params"]] == [id(p) for p in other.parameters()]
    assert other[0].weight.no_decay and other[0].weight is not model[0].weight


def test_slots_belong_to_the_copys_parameters() -> None:
    model, optimizer = made()
    trained(squares)(model, optimizer, torch.randn(4, 4))
    other, copied = copies_of(model, optimizer)
    assert set(copied.state) == set(other.parameters())
    before = optimizer.state[model[0].weight]["mean"].clone()
    trained(squares)(other, copied, torch.randn(4, 4))
    assert torch.equal(optimizer.state[model[0].weight]["mean"], before)


def test_a_scheduled_optimizer_steps_its_own_weights() -> None:
    model, optimizer = made()
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0)
    optimizer.scheduler = scheduler  # type: ignore[attr-defined]
    other, copied = copies_of(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    trained(squares)(other, copied, torch.randn(4, 4))
    assert all(map(torch.equal, before, model.parameters()))
    assert not any(map(torch.equal, before, other.parameters()))
    assert copied.scheduler.optimizer is copied and scheduler.optimizer is optimizer


def test_hooks_are_carried() -> None:
    model, optimizer = made()
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda one, *_: seen.append(one))
    _, copied = copies_of(model, optimizer)
    copied.step()
    assert seen == [copied]


def test_several_optimizers_and_one_inside_another() -> None:
    model, optimizer = made()
    around = Around(optimizer)
    other: Any
    other, (first, second) = copies_of(model, (around, optimizer))
    assert first.base is second and second.beta == 0.9
    assert first.param_groups is second.param_groups
    assert second.param_groups[0]["params"][0] is other[0].weight
    assert not hasattr(torch.optim.Optimizer, "__deepcopy__")


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3"])
def test_verify_of_an_optimizer_with_attributes(layout: str) -> None:
    model, optimizer = made()
    found = tutti.verify(trained(squares), model, optimizer, (torch.randn(4, 4),), layout)
    assert found.ok, str(found)
