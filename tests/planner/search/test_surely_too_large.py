"""Layouts without an estimate: those with smaller micro-batches do not fit either."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.search.ranking import Ranking
from tutti.planner.search.surely_too_large import LeastPeaks, SurelyTooLargeError, finest_first
from tutti.planning.layout_plan import PlanQuestion, answer
from tutti.report.plan_table import StepScale, plan_table

WIDTH, DEPTH, CAPACITY = 256, 64, 6e7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@cache
def ranking(every: bool) -> Ranking:
    with torch.device("meta"):
        model, batch = nn.Sequential(*(Block() for _ in range(DEPTH))), torch.zeros(64, 64, WIDTH)
    job = Job.of(train_step, model, torch.optim.AdamW(model.parameters()), Layout())
    question = PlanQuestion.of(Cluster.parse("8 x h100"), capacity=CAPACITY, every=every)
    return answer(job, (batch,), question).ranking


def test_the_layouts_that_fit_are_the_same() -> None:
    some, every = ranking(False), ranking(True)
    fit = [(r.layout, r.estimate.peak_nbytes) for r in every.rows if r.fits]
    assert fit
    assert [(r.layout, r.estimate.peak_nbytes) for r in some.rows if r.fits] == fit
    assert some.refused == every.refused and some.left_out == every.left_out


def test_a_layout_without_an_estimate_does_not_fit() -> None:
    some, every = ranking(False), ranking(True)
    assert not every.beyond
    assert len(some.beyond) > len(some.rows) / 10
    for layout, why in some.beyond:
        assert not every.row(layout).fits
        assert "does not fit either" in why
    assert {r.layout for r in every.rows} == {r.layout for r in some.rows} | {
        layout for layout, _ in some.beyond
    }


def test_the_table_counts_them() -> None:
    some = ranking(False)
    over = sum(not row.fits for row in some.rows) + len(some.beyond)
    text = plan_table(some, StepScale(64, 0, 1e12, {"": 1e15, "fp32": 1e15}), 5)
    assert f"{over} do not fit 60 MB" in text
    assert f"{len(some.beyond)} of them have no estimate" in text


@pytest.mark.parametrize("layout", ["data=2 micro=4", "data=2 micro=2"])
def test_smaller_micro_batches_far_beyond_the_capacity_refuse(layout: str) -> None:
    bounds = LeastPeaks(100.0)
    bounds.add(Layout.parse("data=2 micro=8"), 151.0)
    with pytest.raises(SurelyTooLargeError, match="micro=8 does not fit either") as found:
        bounds.refuse(Layout.parse(layout))
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)


@pytest.mark.parametrize(
    "layout",
    [
        "data=2 micro=8",  # the same
        "data=2 micro=16",  # smaller micro-batches
        "data=2",  # one micro-batch accumulates no gradients
        "data=2 micro=4 zero=1",  # other words
        "pipe=2 data=2 micro=4",
    ],
)
def test_what_says_nothing_of_a_layout(layout: str) -> None:
    bounds = LeastPeaks(100.0)
    bounds.add(Layout.parse("data=2 micro=8"), 399.0)
    bounds.refuse(Layout.parse(layout))


def test_a_layout_close_to_the_capacity_gets_its_estimate() -> None:
    bounds = LeastPeaks(100.0)
    bounds.add(Layout.parse("data=2 micro=8"), 150.0)
    bounds.refuse(Layout.parse("data=2 micro=4"))
    bounds.add(Layout.parse("data=2 micro=8"), 401.0)
    with pytest.raises(SurelyTooLargeError):
        bounds.refuse(Layout.parse("data=2"))


def test_finest_first_keeps_the_order_of_the_others() -> None:
    layouts = [Layout.parse(x) for x in ("data=2", "data=2 micro=4", "data=4 micro=4", "micro=8")]
    assert [str(x) for x in finest_first(layouts)] == [
        "micro=8",
        "data=2 micro=4",
        "data=4 micro=4",
        "data=2",
    ]
