"""Numbers of a step's Python that are NaN or infinite at some calls, and finite at others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks

INF, NAN = math.inf, math.nan
NUMBERS = [INF, 3.0, 2.0, NAN, INF, 1.0]
NOTHING = float("nan")  # a global that the step reads


def infinite(model: Any, loss: Tensor, given: float) -> Tensor:
    return loss * (2 if math.isinf(given) else 3 if math.isnan(given) else given)


def clamped(model: Any, loss: Tensor, given: float) -> Tensor:
    return loss.clamp(max=given) if given == given else loss


def least(model: Any, loss: Tensor, given: float) -> Tensor:
    model.best = min(model.best, given)
    return loss * (3 if model.best == INF else model.best)


def running(model: Any, loss: Tensor, given: float) -> Tensor:
    known = given if math.isfinite(given) else 1.0
    model.mean = known if math.isnan(model.mean) else 0.9 * model.mean + 0.1 * known
    return loss * model.mean


def best_loss(model: Any, loss: Tensor, given: float) -> Tensor:
    if (value := loss.item()) < model.best:
        model.best = value
        model.count += 1
    return loss * (1 + model.count)


def constant(model: Any, loss: Tensor, given: float) -> Tensor:
    return torch.stack([loss, loss * NOTHING]).nansum()


STEPS = (infinite, clamped, least, running, best_loss, constant)


def losses(of_loss: Any, layout: str | None) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.float64)
    model.best, model.mean, model.count, model.unread = INF, NAN, 0, NAN
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(model: Any, optimizer: Any, x: Tensor, given: float) -> Tensor:
        loss = of_loss(model, model(x).square().mean(), given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    play = step if layout is None else tutti.distribute(step, model, optimizer, layout)
    own = (model, optimizer) if layout is None else ()
    batches = [torch.randn(8, 4, dtype=torch.float64) for _ in NUMBERS]
    found = [
        float(play(*own, x, given).detach()) for x, given in zip(batches, NUMBERS, strict=True)
    ]
    return found, [model.best, model.mean, model.count]


@pytest.mark.parametrize("of_loss", STEPS)
def test_one_device(of_loss: Any) -> None:
    expected, found = losses(of_loss, None), losses(of_loss, "data=1")
    assert found[0] == pytest.approx(expected[0], rel=1e-12, nan_ok=True)
    assert found[1] == pytest.approx(expected[1], rel=1e-12, nan_ok=True)


def every(layout: str) -> list[tuple[list[float], list[float]]]:
    return [losses(of_loss, layout) for of_loss in STEPS]


def test_ranks(ranks: Ranks) -> None:
    for found in ranks.run(every, "data=2 zero=1", n=2):
        for of_loss, (own, state) in zip(STEPS, found, strict=True):
            expected = losses(of_loss, None)
            assert own == pytest.approx(expected[0], rel=1e-12, nan_ok=True), of_loss
            assert state == pytest.approx(expected[1], rel=1e-12, nan_ok=True), of_loss
