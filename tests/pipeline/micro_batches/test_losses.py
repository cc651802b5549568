"""Losses whose terms are normalized by the batch, in micro-batches: as on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from as_eager import Program, assert_as_eager_on_ranks
from ranks import Ranks
from tutti.errors import ShardingError

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
CLASSES = 6


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def _over(x: Tensor, count: Tensor) -> Tensor:
    return x.sum() / count.sum()


WEIGHT = torch.arange(1.0, CLASSES + 1).double()
LOSSES: dict[str, Loss] = {
    "class weights": lambda p, y, m: F.cross_entropy(p, y, weight=WEIGHT),
    "class weights, some ignored": lambda p, y, m: F.cross_entropy(
        p, torch.where(y == 2, -100, y), weight=WEIGHT
    ),
    "class weights, a class ignored": lambda p, y, m: F.cross_entropy(
        p, y, weight=WEIGHT, ignore_index=1
    ),
    "class weights, smoothed": lambda p, y, m: F.cross_entropy(
        p, y, weight=WEIGHT, label_smoothing=0.1
    ),
    "class weights of pixels": lambda p, y, m: F.cross_entropy(
        p[:, :, None].expand(-1, -1, 3), y[:, None].expand(-1, 3), weight=WEIGHT
    ),
    "class weights by hand": lambda p, y, m: (
        (F.cross_entropy(p, y, reduction="none") * WEIGHT[y]).sum() / WEIGHT[y].sum()
    ),
    "less an entropy": lambda p, y, m: F.cross_entropy(p, y) - 0.1 * entropy(p).mean(),
    "ignored, less an entropy": lambda p, y, m: (
        F.cross_entropy(p, y, ignore_index=0) - 0.1 * entropy(p).mean()
    ),
    "masked, less masked": lambda p, y, m: (
        masked_mean(F.cross_entropy(p, y, reduction="none"), m) - masked_mean(entropy(p), m)
    ),
    "a mean in each sample": lambda p, y, m: -((p[:, 0] + p[:, 1].mean()) / 3).mean(),
    "means in each pixel": lambda p, y, m: (
        (p[:, 1].square().mean() - (2 - p.exp() + p[:, 2].mean()) * 0.5).sum(1).mean()
    ),
    "three terms, two counts": lambda p, y, m: (
        _over(p.sin(), m) + _over(p, 8 - (y == 1).sum()) + _over(p.square(), 8 - (y == 1).sum())
    ),
    "scaled terms of three counts": lambda p, y, m: (
        ((_over(p.sin(), m) - _over(p, (y == 1).sum() + 1)) / 3 + _over(p.square(), m + 1)) * 0.5
    ),
    "an entropy less a masked mean": lambda p, y, m: entropy(p).mean() - masked_mean(p[:, 0], m),
}


def _program(loss: Loss) -> Program:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
        x, y, mask = batch
        found = loss(model(x), y, mask)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        return found

    batch = torch.randn(8, 6), torch.randint(CLASSES, (8,)), (torch.rand(8) < 0.7).double()
    return step, model, torch.optim.SGD(model.parameters(), 0.1), batch


for _k, _loss in enumerate(LOSSES.values()):
    _made = partial(_program, _loss)
    _made.__module__, _made.__name__ = __name__, f"program_{_k}"  # type: ignore[attr-defined]
    globals()[f"program_{_k}"] = _made


@pytest.mark.parametrize("name", LOSSES)
def test_as_on_one_device(ranks: Ranks, name: str) -> None:
    program = globals()[f"program_{list(LOSSES).index(name)}"]
    assert_as_eager_on_ranks(ranks, program, "data=2 micro=2")


@pytest.mark.parametrize("layout", ["pipe=2 micro=2", "micro=4", "data=2 pipe=2 micro=2 zero=1"])
@pytest.mark.parametrize(
    "name",
    [
        "class weights",
        "ignored, less an entropy",
        "a mean in each sample",
        "means in each pixel",
        "three terms, two counts",
        "scaled terms of three counts",
    ],
)
def test_other_layouts(name: str, layout: str) -> None:
    torch.manual_seed(0)
    step, model, optimizer, batch = _program(LOSSES[name])
    model.double()
    x, y, mask = batch
    found = tutti.verify(step, model, optimizer, (x.double(), y, mask), layout)
    assert found.ok, str(found)


@pytest.mark.parametrize("layout", ["micro=2", "data=2 micro=2"])
def test_running_sums_of_terms(layout: str) -> None:
    """Returned on the way, too, and scaled: a term that is complete joins each sum afterwards."""

    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
    ) -> tuple[Tensor, ...]:
        p = model(x)
        kept, ignored = (y != 1).sum(), 8 - (y == 1).sum()
        first = p.sin().sum() / kept + p.sum() / ignored
        second = first * 2 + p.square().sum() / ignored
        last = (first - second) / 3 - p.exp().sum() / ignored
        optimizer.zero_grad()
        (first + second + last).backward()
        optimizer.step()
        return first, second, last

    torch.manual_seed(0)
    model = nn.Linear(6, 6).double()
    batch = torch.randn(8, 6).double(), torch.randint(CLASSES, (8,))
    found = tutti.verify(step, model, torch.optim.SGD(model.parameters(), 0.1), batch, layout)
    assert found.ok, str(found)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, y, m: (p / p.abs().sum()).square().sum(),
        lambda p, y, m: (p + p.mean()).square().sum(),  # not linear
        lambda p, y, m: (p * p.mean()).sum(),
    ],
)
def test_a_sum_of_what_the_model_makes_still_couples_the_batch(loss: Loss) -> None:
    torch.manual_seed(0)
    step, model, optimizer, batch = _program(loss)
    with pytest.raises(ShardingError, match="needs all its samples at once"):
        tutti.verify(step, model, optimizer, batch, "micro=2")
