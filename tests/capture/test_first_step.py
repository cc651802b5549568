"""Optimizers by their first step: closures, optimizers inside of others, code without a module, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer, SparseAdam

import tutti
from as_eager import Program, assert_as_eager, eager, played
from tutti.errors import CaptureError


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=made), torch.randn(8, 4, generator=made)


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def by_closure(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure)


def plainly(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    model.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


class Sharp(Optimizer):
    """Climbs to a neighbor, takes the gradient there, and steps from where it was; it needs a closure."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is not None
        held = [(g["rho"], p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for _, p in held]).norm()
        for rho, p in held:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * (rho / (norm + 1e-12)))
        with torch.enable_grad():
            loss = closure()
        for _, p in held:
            p.data = self.state[p]["before"]
        self.base.step()
        return loss


def sharp() -> Program:
    def twice(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        closure()
        return optimizer.step(closure)

    model = mlp()
    return twice, model, Sharp(model.parameters(), SGD, lr=0.1, momentum=0.9), batch()


def test_optimizers_that_call_their_closure_once() -> None:
    for kind in (SGD, Adam):
        assert_as_eager(partial(_program, by_closure, kind))


def _program(train_step: Any, kind: Any) -> Program:
    model = mlp()
    return train_step, model, kind(model.parameters(), lr=0.1), batch()


def test_an_optimizer_that_needs_a_closure_and_calls_another() -> None:
    found, expected = played(sharp, ""), eager(sharp)
    for x, y in zip(found[0], expected[0], strict=True):
        assert x == pytest.approx(y, rel=1e-10)
    assert any(name.endswith("momentum_buffer") for name in found[1])
    # PyTorch's weights lie in the slot "before" by then, and it shows what they are afterwards.
    for name, y in [(n, y) for n, y in expected[1].items() if not n.endswith("before")]:
        assert found[1][name] == pytest.approx(y, rel=1e-10, abs=1e-12), name


class Around(Optimizer):
    """One around another that begins as no optimizer does: without hooks of its own (Lookahead)."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.defaults, self.calls = inner, inner.defaults, 0
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.calls += 1


def _around(parameters: Any, lr: float) -> Around:
    return Around(Adam(parameters, lr=lr))


class AroundWithTables(Around):
    """As many copies of Lookahead: plain dicts in place of PyTorch's tables of hooks."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}


def _around_with_tables(parameters: Any, lr: float) -> Around:
    return AroundWithTables(Adam(parameters, lr=lr))


@pytest.mark.parametrize("around", [_around, _around_with_tables])
def test_an_optimizer_around_another_may_have_no_hooks(around: Any) -> None:
    assert_as_eager(partial(_program, plainly, around))


class Wrapper(Optimizer):
    """One whose groups and state are properties: those of another (Accelerate's optimizer)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.inner, self.calls = Adam(parameters, lr=lr), 0

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> Any:
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.calls += 1


def test_an_optimizer_that_has_the_groups_of_another() -> None:
    assert_as_eager(partial(_program, plainly, Wrapper))


CODE = """
import torch
class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1): super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None: p.add_(p.grad, alpha=-min(group["lr"], 1.0))
"""


@pytest.mark.parametrize("name", [{}, {"__name__": "a_module_that_is_gone"}])
def test_the_code_of_an_optimizer_may_be_in_no_module(name: dict[str, Any]) -> None:
    home = dict(name)
    exec(CODE, home)
    assert_as_eager(partial(_program, step, home["Plain"]))
    assert "min" not in home


@pytest.mark.parametrize("kind", [LBFGS, SparseAdam])
def test_optimizers_whose_steps_differ_in_form_are_refused(kind: Any) -> None:
    model = mlp()
    train_step = tutti.distribute(by_closure, model, kind(list(model.parameters())))
    with pytest.raises(CaptureError, match=f"{kind.__name__} cannot be captured"):
        train_step(*(x.float() for x in batch()))


def test_optimizers_that_communicate_by_themselves_are_refused() -> None:
    class ZeroRedundancyOptimizer(SGD): ...  # as that of torch.distributed.optim

    class Sgd(SGD): ...

    Sgd.__module__ = "horovod.torch.optimizer"
    for kind, fix in ((ZeroRedundancyOptimizer, "zero=1"), (Sgd, "data=N")):
        model = mlp()
        train_step = tutti.distribute(step, model, kind(model.parameters(), 0.1))
        with pytest.raises(CaptureError, match="cannot be captured") as found:
            train_step(*(x.float() for x in batch()))
        assert fix in found.value.fix


def test_an_optimizer_that_takes_no_step_at_all_fails_as_in_pytorch() -> None:
    class Picky(SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("not now")

    model = mlp()
    train_step = tutti.distribute(step, model, Picky(model.parameters()))
    with pytest.raises(ValueError, match="not now"):
        train_step(*(x.float() for x in batch()))
