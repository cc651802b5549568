"""A checkpoint of a step has the numbers of its optimizer's groups, which a scheduler does not restore."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from ranks import Ranks
from small_steps import step as train_step
from tutti.checkpoint.manifest import parse_manifest, read_manifest
from tutti.saving.hyper_parameters import groups_of, take_over, to_json

BEFORE = 3


def prepared(layout: str, *, tensor: bool = False) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    lr = torch.tensor(0.1) if tensor else 0.1
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.8, 0.9))
    step = tutti.distribute(train_step, model, optimizer, layout=layout)
    return step, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def losses(step: Any, schedule: Any, first: int, count: int) -> list[float]:
    found = []
    for k in range(first, first + count):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        found.append(float(step(x)))
        schedule.step()
    return found


def saved(layout: str, path: str) -> dict[str, Any]:
    step, _, schedule = prepared(layout)
    losses(step, schedule, 0, BEFORE)
    step.save(path)
    return schedule.state_dict()


def resumed(layout: str, path: str, schedule_state: dict[str, Any]) -> list[float]:
    step, _, schedule = prepared(layout)
    step.load(path)
    schedule.load_state_dict(schedule_state)
    return losses(step, schedule, BEFORE, 4)


def test_a_run_goes_on_with_its_learning_rate(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    step, _, schedule = prepared("data=1")
    expected = losses(step, schedule, 0, BEFORE + 4)[BEFORE:]
    state = ranks.run(saved, "data=2 zero=3", path, n=2)[0]
    assert resumed("data=1", path, state) == pytest.approx(expected, rel=1e-11)
    for found in ranks.run(resumed, "pipe=1 data=2", path, state, n=2):
        assert found == pytest.approx(expected, rel=1e-11)


def test_every_number_comes_back(tmp_path: Path) -> None:
    step, optimizer, schedule = prepared("data=1", tensor=True)
    losses(step, schedule, 0, BEFORE)
    optimizer.param_groups[0]["weight_decay"] = 0.25
    optimizer.param_groups[0]["name"] = "all"
    step.save(tmp_path / "saved")
    again, other, _ = prepared("data=1", tensor=True)
    other.param_groups[0] |= {"betas": (0.5, 0.5), "name": ""}
    own = other.param_groups[0]["lr"]
    again.load(tmp_path / "saved")
    assert other.param_groups[0]["lr"] is own
    assert groups_of(other) == groups_of(optimizer)
    assert groups_of(other)[0][0]["betas"] == (0.8, 0.9)


def test_other_groups_stay_and_are_told(tmp_path: Path) -> None:
    step, _, schedule = prepared("data=1")
    losses(step, schedule, 0, BEFORE)
    step.save(tmp_path / "saved")
    model = nn.Linear(4, 4).double()
    groups = [{"params": [p], "lr": 0.3} for p in model.parameters()]
    other = torch.optim.Adam(groups)
    again = tutti.distribute(train_step, model, other, layout="data=1")
    with pytest.warns(UserWarning, match="other parameter groups than when it was saved"):
        again.load(tmp_path / "saved")
    assert [g["lr"] for g in other.param_groups] == [0.3, 0.3]
    torch.testing.assert_close(model.weight.detach(), step.model.weight.detach())


def test_a_manifest_without_them_leaves_them(tmp_path: Path) -> None:
    step, optimizer, schedule = prepared("data=1")
    losses(step, schedule, 0, 1)
    step.save(tmp_path / "saved")
    manifest = parse_manifest(read_manifest(tmp_path / "saved"), tmp_path / "saved")
    assert manifest.groups == to_json(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_over(optimizer, [])
    assert optimizer.param_groups[0]["lr"] == 0.1
