"""Functions, methods and classes of the script that it replaces between two calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from ranks import Ranks

CALLS = 6


def squares(a: Tensor, b: Tensor) -> Tensor:
    return F.mse_loss(a, b)


def absolute(a: Tensor, b: Tensor) -> Tensor:
    return F.l1_loss(a, b)


LOSS: Callable[[Tensor, Tensor], Tensor] = squares


class Criterion:
    weight = 1.0

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return squares(a, b)

    @staticmethod
    def static(a: Tensor, b: Tensor) -> Tensor:
        return squares(a, b)

    @property
    def scale(self) -> float:
        return 1.0

    @functools.cached_property
    def other(self) -> float:
        return 1.0


class Inherits(Criterion):
    """Gets a method of its own between calls."""


class Chosen(Criterion):
    """Another class may have its name."""


class Absolute(Criterion):
    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return absolute(a, b)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def mix(self, x: Tensor) -> Tensor:
        return x + self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


CRITERION, INHERITS = Criterion(), Inherits()
HELD = SimpleNamespace(loss=squares)


def by_name(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return LOSS(model(x), y)


def by_method(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return CRITERION.loss(model(x), y)


def by_static_method(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return Criterion.static(model(x), y)


def by_property(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return squares(model(x), y) * CRITERION.scale


def by_inherited_method(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return INHERITS.loss(model(x), y)


def by_class(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return Chosen().loss(model(x), y)


def by_attribute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return HELD.loss(model(x), y)


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return squares(model(x), y)


def _set(holder: Any, name: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        setattr(holder, name, value)

    return change


def _as_silu(model: Any) -> None:
    model[1].__class__ = nn.SiLU
    model[1].inplace = False


def _globally(name: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        globals()[name] = value

    return change


# By name: the loss of a step, and the change before its third call.
CASES: dict[str, tuple[Any, Callable[[nn.Module], None]]] = {
    "global": (by_name, _globally("LOSS", absolute)),
    "helper": (by_name, _globally("squares", absolute)),  # not the global `LOSS`: no change
    "function in a function": (plain, _globally("squares", lambda a, b: absolute(a, b) * 2)),
    "method": (by_method, _set(Criterion, "loss", lambda self, a, b: absolute(a, b))),
    "static method": (by_static_method, _set(Criterion, "static", staticmethod(absolute))),
    "property": (by_property, _set(Criterion, "scale", property(lambda self: 3.0))),
    "inherited method": (
        by_inherited_method,
        _set(Inherits, "loss", lambda self, a, b: absolute(a, b)),
    ),
    "class": (by_class, _globally("Chosen", Absolute)),
    "attribute": (by_attribute, _set(HELD, "loss", absolute)),
    "method of a module": (plain, _set(Block, "mix", lambda self, x: self.inner(x))),
    "forward": (plain, _set(Block, "forward", lambda self, x: self.inner(x) * 2)),
    "class of a module": (plain, _as_silu),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with _restored():
        yield


class _restored:
    """A context that restores what the cases replace."""

    def __enter__(self) -> None:
        self.globals = {name: globals()[name] for name in ("LOSS", "squares", "Chosen")}
        self.members = {one: dict(vars(one)) for one in (Criterion, Block)}

    def __exit__(self, *_: object) -> None:
        globals().update(self.globals)
        HELD.loss = self.globals["squares"]
        for one, members in self.members.items():
            for name, held in members.items():
                if vars(one)[name] is not held:
                    setattr(one, name, held)
        if "loss" in vars(Inherits):
            del Inherits.loss


def run(name: str, layout: str | None) -> list[Any]:
    """The losses, and the weights at the end; each case changes back before the fifth call."""
    loss_of, change = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step = None if layout is None else tutti.distribute(train_step, model, optimizer, layout)
    found = []
    with _restored():
        for k in range(CALLS):
            if k == 2:
                change(model)
            made = torch.Generator().manual_seed(k)
            x = torch.randn(8, 8, generator=made, dtype=torch.float64)
            y = torch.randn(8, 4, generator=made, dtype=torch.float64)
            given = (x, y) if step is not None else (model, optimizer, x, y)
            found.append((step or train_step)(*given))
    with tutti.whole(model):
        return [*found, *(p.detach().clone() for p in model.parameters())]


def _same(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_replaced_function_counts_from_the_next_call_on(name: str) -> None:
    _same(run(name, ""), run(name, None))


@pytest.mark.parametrize("name", ["global", "method", "class of a module"])
def test_on_ranks(name: str, ranks: Ranks) -> None:
    expected = run(name, None)
    for found in ranks.run(run, name, "data=2 zero=3", n=2):
        _same(found, expected)


def test_the_same_functions_need_no_further_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = by_property(model, x, y) + by_static_method(model, x, y) + by_method(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step = tutti.distribute(train_step, model, optimizer, "")
    for _ in range(4):
        step(torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64))
    assert step._num_traces == 1
