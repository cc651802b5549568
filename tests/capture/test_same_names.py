"""Values that a step reaches by two ways under one name: closures, defaults, methods, globals."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from ranks import Ranks
from tutti.capture.python.held_values import CELL, ITEM, MEMBER, SCOPE, Table, distinct, named

Terms = Callable[[], tuple[Callable[[Tensor], Tensor], ...]]
count = 10


def _program(*terms: Callable[[Tensor], Tensor]) -> Program:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        y = model(x)
        loss = torch.stack([term(y) for term in terms]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(8, 6),)


def counters() -> Program:
    def counter(by: int) -> Callable[[Tensor], Tensor]:
        n = 0

        def term(y: Tensor) -> Tensor:
            nonlocal n
            n += by
            return y.square().mean() * n

        return term

    return _program(counter(1), counter(2))


def running_means() -> Program:
    def running(rate: float) -> Callable[[Tensor], Tensor]:
        mean = torch.zeros(6)

        def term(y: Tensor) -> Tensor:
            with torch.no_grad():
                mean.lerp_(y.mean(0), rate)
            return (y - mean).square().mean()

        return term

    return _program(running(0.1), running(0.5))


def defaults() -> Program:
    """nerf-pytorch's embedder: functions in a loop, with the frequency as a default."""
    terms = []
    for f in torch.linspace(1.0, 2.0, steps=3):
        for function in (torch.sin, torch.cos):
            terms.append(lambda y, p=function, f=f: p(y * f).mean())
    return _program(*terms)


def named_defaults() -> Program:
    def made(weight: Tensor) -> Callable[[Tensor], Tensor]:
        def term(y: Tensor, *, w: Tensor = weight) -> Tensor:
            return F.mse_loss(y, w.expand_as(y))

        return term

    return _program(made(torch.ones(6)), made(torch.arange(6.0)))


class Meter:
    """A mean of what it has seen, in a tensor and in numbers."""

    def __init__(self, rate: float) -> None:
        self.rate, self.calls, self.mean, self.seen = rate, 0, torch.zeros(6), {}

    def term(self, y: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(y.detach().mean(0), self.rate)
        self.seen["rows"] = self.seen.get("rows", 0) + y.shape[0]
        return (y - self.mean).square().mean() * self.calls + self.seen["rows"] * y.mean()


def methods() -> Program:
    return _program(Meter(0.1).term, Meter(0.5).term)


def a_global_and_a_variable() -> Program:
    own = 0

    def count_of_closure() -> Callable[[Tensor], Tensor]:
        count = 0

        def term(y: Tensor) -> Tensor:
            nonlocal count, own
            count += 1
            own += 2
            return y.square().mean() * (count + own)

        return term

    def term(y: Tensor) -> Tensor:
        return y.sin().mean() * count

    return _program(count_of_closure(), term)


PROGRAMS = [counters, running_means, defaults, named_defaults, methods, a_global_and_a_variable]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_each_value_is_its_own(program: Callable[[], Program]) -> None:
    assert_as_eager(program, calls=4)


def test_on_ranks(ranks: Ranks) -> None:
    assert_as_eager_on_ranks(ranks, counters, "data=2 zero=1")
    assert_as_eager_on_ranks(ranks, defaults, "data=2 zero=1")


def test_a_checkpoint_has_both() -> None:
    torch.manual_seed(0)
    step, model, optimizer, batch = running_means()
    first = tutti.distribute(step, model, optimizer)
    losses = [float(first(*batch)) for _ in range(4)]
    torch.manual_seed(0)
    step, model, optimizer, batch = running_means()
    second = tutti.distribute(step, model, optimizer)
    for _ in range(2):
        second(*batch)
    state = second.state_dict()
    assert {"python.mean", "python.mean (2)"} <= state.keys()
    kept = {name: x.clone() if isinstance(x, Tensor) else x for name, x in state.items()}
    torch.manual_seed(0)
    step, model, optimizer, batch = running_means()
    third = tutti.distribute(step, model, optimizer)
    third(*batch)
    third.load_state_dict(kept)
    assert [float(third(*batch)) for _ in range(2)] == losses[2:]


def _table(prefix: str, kind: str, held: Any, keys: list[Any] | None = None) -> Table:
    return Table(prefix, kind, lambda: held, keys)


def test_names_are_distinct() -> None:
    def cell(value: int) -> Any:
        return types.CellType(value)

    first, second, shared = {"n": 1}, {"n": 2, "k": 6}, {"x": 5}
    tables = [
        _table("n", CELL, cell(0)),
        _table("n", CELL, cell(0)),
        _table("self.", MEMBER, first, ["n"]),
        _table("self.", MEMBER, second, ["n"]),
        _table("self.", MEMBER, {"n": 3, "m": 4}, ["n", "m"]),
        _table("self.", MEMBER, first, ["n"]),
        _table("", SCOPE, {"n": 1, "__name__": "other"}, ["n"]),
        _table("seen", ITEM, {}),
        _table("seen", ITEM, {}),
        _table("seen", ITEM, shared),
        _table("self.", MEMBER, second, ["k"]),
        _table("seen", ITEM, shared),
    ]
    found = distinct(tables)
    assert [one.prefix for one in found] == [
        *("n", "n (2)", "self.", "self (2).", "self (3).", "self.", "other."),
        *("seen", "seen (2)", "seen (3)", "self (2).", "seen (3)"),
    ]
    names = [name for name, _, _ in named(found)]
    assert names == [
        *("n", "n (2)", "self.n", "self (2).n", "self (3).n", "self (3).m", "self.n", "other.n"),
        *("seen (3)['x']", "self (2).k", "seen (3)['x']"),
    ]


def test_thousands_of_one_name_take_little_time() -> None:
    """As the functions of a library, which are all called `wrapper`: no search for each."""
    asked = 0

    def find(held: dict[str, int]) -> dict[str, int]:
        nonlocal asked
        asked += 1
        return held

    tables = [Table("wrapper.", MEMBER, partial(find, {"n": k}), ["n"]) for k in range(2000)]
    found = distinct(tables)
    assert len({one.prefix for one in found}) == len(tables)
    assert asked < 10 * len(tables)
