"""A plan of several precisions is the plans of each, merged; it says which one it has not tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from small_steps import trained
from tutti.capture.step import capture
from tutti.cli.plan_layouts import about_figures
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.layout.layout import PRECISIONS
from tutti.planner.search import ranking
from tutti.planning import candidate_programs, step_estimates
from tutti.planning.layout_plan import PlanAnswer, PlanQuestion, answer

WORDS = "micro=2 schedule=1f1b"


train_step = trained(lambda model, x: F.mse_loss(model(x), x))


def layers(count: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    made = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(count))
    return nn.Sequential(*made).to(dtype)


def planned(
    model: nn.Module, given: str, precisions: tuple[str, ...] = (), devices: str = "2 x h100"
) -> PlanAnswer:
    job = Job.of(train_step, model, torch.optim.AdamW(model.parameters()), Layout())
    cluster = Cluster.parse(devices)
    question = PlanQuestion.of(cluster, given=given, precisions=precisions)
    batch = (torch.zeros(8, 64, dtype=next(model.parameters()).dtype),)
    return answer(job, batch, question)


def figures(made: PlanAnswer) -> dict[str, Any]:
    return {r.layout: (r.estimate.seconds, r.estimate.peak_nbytes) for r in made.ranking.rows}


@pytest.mark.parametrize("is_composed", [False, True])
def test_both_precisions_are_the_plans_of_each(
    is_composed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "NUM_REFINED", 1000)
    count, devices = 2, "2 x h100"
    if is_composed:  # hundreds of layouts in a second
        monkeypatch.setattr(step_estimates, "_MOST_NODES", 0)
        count, devices = 6, "4 x h100"
    both = planned(layers(count), WORDS, PRECISIONS, devices)
    plain = planned(layers(count), WORDS, devices=devices)
    bf16 = planned(layers(count), f"{WORDS} precision=bf16", devices=devices)
    assert len(both.ranking.rows) > 10
    assert figures(both) == figures(plain) | figures(bf16)
    assert both.peaks == plain.peaks | bf16.peaks and both.peaks["fp32"] < both.peaks["bf16"]
    assert (plain.faster_precision, bf16.faster_precision, both.faster_precision) == (
        "bf16",
        None,
        None,
    )


def test_weights_of_another_dtype_refuse_a_precision_and_the_rest_is_ranked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures = []

    def counted(*args: Any, precision: str) -> Any:
        captures.append(precision)
        return capture(*args, precision=precision)

    monkeypatch.setattr(candidate_programs, "capture", counted)
    made = planned(layers(2, torch.bfloat16), WORDS, PRECISIONS)
    assert captures.count("bf16") == 1  # of several layouts
    assert {r.estimate.layout.precision for r in made.ranking.rows} == {"fp32"}
    assert any("bf16" in layout for layout, _ in made.ranking.refused)
    assert planned(layers(2, torch.bfloat16), WORDS).faster_precision is None  # it computes in bf16


class Wide(nn.Module):
    """Its second product is none that autocast casts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.second(x.float())[:, :1].expand(-1, 64)


@pytest.mark.parametrize(("width", "stays"), [(256, True), (16, False)])
def test_what_stays_in_float32_is_named(width: int, stays: bool) -> None:
    made = planned(Wide(width), f"{WORDS} precision=bf16 data=2")
    text = "\n".join(about_figures(made))
    device = Cluster.parse("h100").device
    dtype = torch.float32 if stays else torch.bfloat16
    assert made.peaks == {"bf16": device.peak_of(dtype)}
    assert ("Under precision=bf16 most operations stay float32" in text) == stays
    if stays:
        assert made.wide["bf16"].name in text and "mm" in made.wide["bf16"].name
        assert "test_precisions.py:" in made.wide["bf16"].source
        assert not planned(Wide(width), f"{WORDS} data=2").wide


@pytest.mark.parametrize(("depth", "composes"), [(6, "layers"), (2, "")])
def test_composed_estimates_are_told(
    depth: int, composes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_estimates, "_MOST_NODES", 0)
    made = planned(layers(depth), f"{WORDS} data=2")
    assert made.composes == composes
    told = any("estimates are composed of pieces" in text for text in about_figures(made))
    assert told == bool(composes)
