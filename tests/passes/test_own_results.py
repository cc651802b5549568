"""`own_results`: what a step returns stays what it is, and is nobody else's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import tutti
from captured_once import captured_once
from ranks import Ranks
from small_programs import Builder, lines
from small_steps import step
from tutti.environment import WITHOUT
from tutti.passes.own_results import own_results
from tutti.passes.pass_table import optional_names

aten = torch.ops.aten


def test_before_and_after() -> None:
    b = Builder()
    w, x = b.given("w", 4, 4), b.given("batch.0", 4, 4, kind="batch")
    row = b.call(aten.select.int, w, 0, 0, shape=(4,))
    loss = b.call(aten.sum.default, x, shape=())
    alone = b.call(aten.mul.Tensor, x, 2.0)
    part = b.call(aten.select.int, alone, 0, 0, shape=(4,))
    new = b.call(aten.add.Tensor, w, x)
    graph = b.done([w, row, loss, loss, part, new, x], [new])
    assert own_results(graph) == 5
    assert lines(graph) == [
        "clone(%batch.0)",
        "clone(%w)",
        "select.int(%w, 0, 0)",
        "clone(%4)",
        "sum(%batch.0)",
        "clone(%6)",
        "mul.Tensor(%batch.0, 2.0)",
        "select.int(%8, 0, 0)",
        "add.Tensor(%w, %batch.0)",
        "clone(%10)",
    ]
    assert own_results(graph) == 0  # once is enough


class Counting(nn.Linear):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("count", torch.zeros(2))


def count(model: Any) -> None:
    with torch.no_grad():
        model.count.add_(1)


def _returning(found: Callable[[Any], Any]) -> Callable[..., Any]:
    def train_step(model: Any, optimizer: Optimizer, x: Tensor) -> Any:
        before = found(model)
        loss = step(model, optimizer, x)
        count(model)
        return loss, before, found(model), loss.clone(), loss.clone()

    return train_step


FOUND: dict[str, Callable[[Any], Tensor]] = {
    "weight": lambda model: model.weight.detach().clone(),
    "flat": lambda model: model.weight.detach().clone().view(-1),
    "row": lambda model: (model.weight.detach() * 1.0)[:1],
    "count": lambda model: model.count.clone(),
    "first count": lambda model: model.count.clone()[:1],
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, 0.125, momentum=0.5),
    "adamw": lambda params: AdamW(params, 0.125, fused=True),
}


def kept(found: str, optimizer: str, layout: str | None) -> list[Any]:
    """What steps have returned, looked at when all are over; `layout` None: by plain PyTorch."""
    torch.manual_seed(0)
    model = Counting().double()
    own = OPTIMIZERS[optimizer](model.parameters())
    train_step = _returning(FOUND[found])
    results = []
    played = None if layout is None else tutti.distribute(train_step, model, own, layout)
    with captured_once((found, optimizer)):
        for x in torch.randn(
            4, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ):
            result = train_step(model, own, x) if played is None else played(x)
            results += [*map(torch.detach, result)]
    for x in results[::5]:
        x.zero_()  # what is written into one shows in no other, nor in the model
    assert torch.equal(model.count, torch.full((2,), 4.0))  # type: ignore[arg-type]
    return [x.clone() for x in results]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(map(torch.allclose, found, wanted))


@pytest.mark.parametrize("without", ["", "in_place", "all"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "found", FOUND
)  # the last one varies slowest: one capture for three sets of passes
def test_results_stay_on_one_device(
    found: str, optimizer: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ",".join(optional_names()) if without == "all" else without
    monkeypatch.setenv(WITHOUT.name, names)
    assert same(kept(found, optimizer, ""), kept(found, optimizer, None))


@pytest.mark.parametrize("checked", ["TUTTI_CHECK_NAN"])
def test_results_stay_where_every_node_is_checked(
    checked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(checked, "1")
    assert same(kept("count", "sgd", ""), kept("count", "sgd", None))


ON_RANKS = [*((found, "sgd") for found in FOUND), ("weight", "adamw"), ("first count", "adamw")]


def all_kept(layout: str | None) -> list[list[Any]]:
    return [kept(found, optimizer, layout) for found, optimizer in ON_RANKS]


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=1", "data=2 zero=3"])
def test_results_stay_on_ranks(ranks: Ranks, layout: str) -> None:
    wanted = all_kept(None)
    for of_rank in ranks.after(all_kept, "").run(all_kept, layout, n=2):
        for pair, have, want in zip(ON_RANKS, of_rank, wanted, strict=True):
            assert same(have, want), pair


def test_a_result_is_not_the_state() -> None:
    model = Counting()
    optimizer = SGD(model.parameters(), 0.125)
    played = tutti.distribute(_returning(FOUND["count"]), model, optimizer, "")
    before = copy.deepcopy(model.state_dict())
    for x in played(torch.ones(2, 4)):
        x.fill_(100.0)
    assert torch.equal(model.count, before["count"] + 1)  # type: ignore[operator]
