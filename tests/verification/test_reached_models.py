"""Steps that reach the model and the optimizer by other ways than their arguments are verified on copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import tutti
from tutti.capture.state.lift import optimizers_of
from tutti.verification.verdict import Subject

Subjects = tuple[Callable[..., Any], Any, Any]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def taken(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


class Trainer:
    """All that is used is held by the object whose method the step is."""

    def __init__(self) -> None:
        self.model, self.optimizer = made()
        self.schedule = StepLR(self.optimizer, 1, 0.5)
        self.several = {"models": [self.model], "optimizers": (self.optimizer, None)}

    def by_attributes(self, _model: Any, _optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return taken(self.model, self.optimizer, x, y)

    def by_containers(self, _model: Any, _optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return taken(self.several["models"][0], self.several["optimizers"][0], x, y)

    def with_a_schedule(self, _model: Any, _optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = taken(self.model, self.optimizer, x, y)
        self.schedule.step()
        return loss


class OfItself(nn.Module):
    """The step is a method of the model, which holds its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.optimizer = torch.optim.AdamW(self.layer.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def train_step(self, _model: Any, _optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return taken(self, self.optimizer, x, y)


def trainer(name: str) -> Subjects:
    one = Trainer()
    return getattr(one, name), one.model, one.optimizer


def closure() -> Subjects:
    model, optimizer = made()
    return lambda _m, _o, x, y: taken(model, optimizer, x, y), model, optimizer


def closure_of_parts() -> Subjects:
    model, optimizer = made()
    first, weight = model[0], model[2].weight  # type: ignore[index]

    def step(_model: Any, _optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) + first.bias.sum() + weight.square().sum()
        for group in optimizer.param_groups:
            group["lr"] = 0.05
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def defaults() -> Subjects:
    model, optimizer = made()

    def step(_m: Any, _o: Any, x: Tensor, y: Tensor, model: Any = model, *, by: Any = optimizer):
        return taken(model, by, x, y)

    return step, model, optimizer


def partial() -> Subjects:
    model, optimizer = made()
    step = functools.partial(lambda m, _m, _o, x, y, by: taken(m, by, x, y), model, by=optimizer)
    return step, model, optimizer


def method_of_the_model() -> Subjects:
    model = OfItself()
    return model.train_step, model, model.optimizer


def two_models() -> Subjects:
    (one, by_one), (other, by_other) = made(), made()

    def step(_model: Any, _optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return taken(one, by_one, x, y) + taken(other, by_other, x, y)

    return step, {"one": one, "other": other}, [by_one, by_other]


WAYS = {
    "by_attributes": lambda: trainer("by_attributes"),
    "by_containers": lambda: trainer("by_containers"),
    "with_a_schedule": lambda: trainer("with_a_schedule"),
    **{f.__name__: f for f in (closure, closure_of_parts, defaults, partial)},
    **{f.__name__: f for f in (method_of_the_model, two_models)},
}


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 1, 0])


# Replicas make their own copies, of the same kinds of holders.
REPLICAS = ("by_containers", "with_a_schedule", "closure", "method_of_the_model", "two_models")


@pytest.mark.filterwarnings("error:Seems like")
@pytest.mark.parametrize(
    ("way", "layout"),
    [
        *((way, "data=2 zero=3") for way in WAYS),
        *((way, "replica=2 sync=average(every=1)") for way in REPLICAS),
    ],
)
def test_the_step_is_the_same_and_nothing_of_the_users_is_touched(way: str, layout: str) -> None:
    step, model, optimizer = WAYS[way]()
    models = list(model.values()) if isinstance(model, dict) else [model]
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in models]
    verdict = tutti.verify(step, model, optimizer, batch(), layout)
    assert verdict.ok, verdict
    for one, state in zip(models, before, strict=True):
        assert all(v.equal(state[k]) for k, v in one.state_dict().items())
        assert all(p.grad is None for p in one.parameters())
    for one in optimizers_of(optimizer):
        assert not one.state and one.param_groups[0]["lr"] in (0.1, 1e-3)


@pytest.mark.parametrize("way", [w for w in WAYS if w != "two_models"])
def test_it_is_the_copy_that_is_trained(way: str) -> None:
    """A step that reached the given model would leave the copy as it is, in every layout."""
    step, model, optimizer = WAYS[way]()
    subject = Subject(step, model, optimizer, batch())
    assert {n for n, _ in model.named_parameters()} <= set(subject.captured.updated)
    tutti.distribute(step, model, optimizer)(*batch())  # what stood there before stands there again
    assert all(x.any() for s in optimizers_of(optimizer)[0].state.values() for x in s.values())
