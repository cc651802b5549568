"""Checks of tensors that raise on a way which no call goes: the step trains as in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import reading_programs as programs
import tutti
from checks_of_values import GUARDS
from python_programs import mlp, update
from ranks import Ranks


def trained(name: str, layout: str | None) -> list[Tensor]:
    """The losses of a step with this check, and its weights at the end; eager without a `layout`."""
    check, model = GUARDS[name], mlp()

    def step(m: Any, o: Any, x: Tensor) -> Tensor:
        loss = m(x).square().mean()
        check(loss, x)
        return update(loss, o)

    optimizer = SGD(model.parameters(), lr=0.1)
    played: Callable[[Tensor], Tensor] = lambda x: step(model, optimizer, x)  # noqa: E731
    if layout is not None:
        played = tutti.distribute(step, model, optimizer, layout)
    losses = [played(programs.batch(k)).detach().clone() for k in range(3)]
    with tutti.whole(model):
        return [*losses, *(p.detach().clone() for p in model.parameters())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", GUARDS)
def test_one_device_is_eager(name: str) -> None:
    assert_same(trained(name, ""), trained(name, None))


@pytest.mark.parametrize("name", GUARDS)
def test_two_ranks_are_eager(ranks: Ranks, name: str) -> None:
    for found in ranks.run(trained, name, "data=2 zero=3", n=2):
        assert_same(found, trained(name, None))


@pytest.mark.parametrize("name", GUARDS)
def test_micro_batches_are_eager(name: str) -> None:
    assert_same(trained(name, "micro=2"), trained(name, None))


@pytest.mark.parametrize("kind", [FloatingPointError, OverflowError, ZeroDivisionError, ValueError])
def test_an_error_on_the_way_of_the_call_is_the_users(kind: type[Exception]) -> None:
    model = mlp()

    def step(m: Any, o: Any, x: Tensor) -> Tensor:
        loss = m(x).square().mean()
        if not torch.isfinite(loss):
            raise kind("not finite")
        return update(loss, o)

    played = tutti.distribute(step, model, SGD(model.parameters(), lr=0.1), "")
    played(programs.batch(0))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match="not finite"):
        played(programs.batch(1) * float("nan"))
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())


def test_a_refusal_on_the_way_of_the_call() -> None:
    """The first way is refused, and the other one plays; a call of the first way is refused then."""
    model = mlp()

    def step(m: Any, o: Any, x: Tensor) -> Tensor:
        loss = m(x).square().mean()
        if not torch.isfinite(loss):
            return loss * len(f"{loss.item()}")
        return update(loss, o)

    played = tutti.distribute(step, model, SGD(model.parameters(), lr=0.1), "")
    played(programs.batch(0))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(tutti.CaptureError, match="writes a tensor's value into a text"):
        played(programs.batch(1) * float("inf"))
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())


def test_a_refusal_of_both_ways_is_told() -> None:
    """The error of a way that the step may not go does not hide it."""
    model = mlp()

    def step(m: Any, o: Any, x: Tensor) -> Tensor:
        loss = m(x).square().mean()
        if loss > 1e6:
            raise ValueError("too large")
        print(f"{loss.item():.3f}")
        return update(loss, o)

    played = tutti.distribute(step, model, SGD(model.parameters(), lr=0.1), "")
    with pytest.raises(tutti.CaptureError, match="writes a tensor's value into a text"):
        played(programs.batch(0))


def test_a_step_of_many_ways_is_warned_of_with_the_line_that_reads() -> None:
    """One branch for each parameter, as where DINO clips gradients one by one."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, bounds: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p, bound in zip(model.parameters(), bounds, strict=True):
            assert p.grad is not None
            if bound > 0:  # the read
                p.grad.mul_(0.5)
        optimizer.step()
        return loss

    step = tutti.distribute(train_step, model, optimizer, "")
    with pytest.warns(
        UserWarning, match=r"traced 8 times.*test_guarded_steps\.py:\d+: torch\.where"
    ):
        for k in range(8):
            step(torch.randn(4, 4), torch.tensor([float(k >> i & 1) for i in range(8)]))
