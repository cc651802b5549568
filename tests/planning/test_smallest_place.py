"""A layout that fits with the placement of least memory alone: planned, saved, run."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests.support.ranks import Ranks
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planning.layout_plan import PlanAnswer, PlanQuestion, answer
from tutti.planning.plan_file import Plan
from tutti.version import VERSION

WORDS = "tensor=2 micro=1 remat=none"
TOKENS = torch.arange(512).view(8, 64) % 1024


def model() -> nn.Module:
    """Whole, its embedding takes no time, and most of the memory."""
    torch.manual_seed(0)
    hidden = [nn.LayerNorm(16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)]
    return nn.Sequential(nn.Embedding(1024, 16), *hidden)


def train_step(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
    loss = model(tokens).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def optimizer_of(one: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(one.parameters(), 0.1)


@cache
def planned(capacity: float) -> PlanAnswer:
    one = model()
    job = Job.of(train_step, one, optimizer_of(one), Layout())
    options = {"num_ranks": 2, "given": WORDS, "capacity": capacity}
    return answer(job, (TOKENS,), PlanQuestion.of(Cluster.parse("2 x h100"), **options))


def test_room_for_the_fastest_placement() -> None:
    made = planned(1e9)
    assert made.ranking.best.layout == "tensor=2"
    assert made.found == {} and made.plan(VERSION, "2 x h100").found is None


def test_less_room_splits_more_weights() -> None:
    wide = planned(1e9).ranking.best.estimate
    tight = planned(wide.peak_nbytes - 1)
    best = tight.ranking.best.estimate
    assert best.peak_nbytes < wide.peak_nbytes
    assert best.seconds >= wide.seconds
    found = tight.plan(VERSION, "2 x h100").found
    assert found is not None and found["0.weight"] == "tensor, -"
    with pytest.raises(tutti.PlanError, match="no layout fits"):
        _ = planned(best.peak_nbytes - 1).ranking.best


def _on_rank(path: str) -> tuple[list[float], str]:
    given = {"TUTTI_PLAN": path, "TUTTI_LAYOUT": Plan.read(Path(path)).layout}
    with patch.dict(os.environ, given):  # as `tutti run --plan` does
        one = model()
        step = tutti.distribute(train_step, one, optimizer_of(one))
        losses = [step(TOKENS).item() for _ in range(3)]
        return losses, step.explain()


def test_a_run_takes_the_placement_of_its_plan(tmp_path: Path, ranks: Ranks) -> None:
    peak = planned(1e9).ranking.best.estimate.peak_nbytes
    path = tmp_path / "plan.json"
    planned(peak - 1).plan(VERSION, "2 x h100").write(path)
    one = model()
    alone = tutti.distribute(train_step, one, optimizer_of(one), "")
    expected = [alone(TOKENS).item() for _ in range(3)]
    for losses, text in ranks.run(_on_rank, str(path), n=2):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert re.search(r"0\.weight +f32 +\[1024, 16\] +tensor, - +tensor, - +32.8 kB", text), text
        assert "0.weight: tensor, -, by the plan" in text
