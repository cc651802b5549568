"""Optimizers around another one, whose groups they have: with slots of their own, or with none."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import tutti
from ranks import Ranks
from runs import whole
from tutti.errors import TuttiError

NUM_CALLS = 6


class Around(Optimizer):
    """Has the groups and the state of another optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()  # type: ignore[attr-defined]
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.scale, self.count = 1.0, 0

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(self.scale).sub_(0.01 * self.count * p)
        return self.optimizer.step(closure)


class SlowWeights(Around):
    """Keeps slow weights, as Lookahead, in a state of its own; a group of the other counts."""

    state: Any = None

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group.setdefault("counter", 0)
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] >= 2:
                group["counter"] = 0
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
        return loss


class LateSlots(SlowWeights):
    """Makes its slots in the first step."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            if "slow" not in self.state[p]:
                self.state[p]["slow"] = p.detach().clone()
        return super().step(closure)


WRAPPERS: dict[str, Callable[[Any], Optimizer]] = {
    "pure": lambda params: Around(SGD(params, lr=0.05, momentum=0.9)),
    "slow": lambda params: SlowWeights(SGD(params, lr=0.05, momentum=0.9)),
    "slow Adam": lambda params: SlowWeights(Adam(params, lr=0.05)),
    "two": lambda params: SlowWeights(Around(Adam(params, lr=0.05))),
    "late": lambda params: LateSlots(SGD(params, lr=0.05, momentum=0.9)),
}


def played(name: str, layout: str | None) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = WRAPPERS[name](model.parameters())

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    play: Any = step if layout is None else tutti.distribute(step, model, optimizer, layout)
    given = (model, optimizer) if layout is None else ()
    found: list[Any] = []
    for k in range(NUM_CALLS):
        if k == 3:
            vars(optimizer)["scale"] = 0.5
            optimizer.param_groups[0]["lr"] = 0.02
        draw = torch.Generator().manual_seed(k)
        x = torch.randn(8, 8, generator=draw, dtype=torch.float64)
        found += [
            play(*given, x).detach(),
            *(whole(p).detach().clone() for p in model.parameters()),
        ]
    slots = [x for p in model.parameters() for x in optimizer.state[p].values()]
    found += [whole(x).detach() for x in slots if isinstance(x, Tensor)]
    return [x.numpy() for x in found] + [vars(optimizer)["count"]]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", WRAPPERS)
def test_one_device_is_eager(name: str) -> None:
    assert_same(played(name, ""), played(name, None))


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3"])
def test_two_ranks_are_eager(ranks: Ranks, layout: str) -> None:
    for name in ("pure", "slow Adam", "late"):
        for found in ranks.run(played, name, layout, n=2):
            assert_same(found, played(name, None))


class Wrapper:
    """A user's object that holds an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.accumulates, self.optimizer = 1, optimizer


def test_an_object_around_an_optimizer_is_refused_with_the_optimizer() -> None:
    model = nn.Linear(4, 4)
    wrapper: Any = Wrapper(SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        TuttiError, match=r"expected a torch\.optim\.Optimizer, got Wrapper"
    ) as caught:
        tutti.distribute(lambda model, optimizer, x: x, model, wrapper)
    assert "wrapper.optimizer" in caught.value.fix and "closure" in caught.value.fix
