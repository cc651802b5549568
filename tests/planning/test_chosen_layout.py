"""`layout="auto"`: the first call chooses, on one device and on ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests.planning.test_hardware_files import FOUND
from tests.support.ranks import Ranks
from tutti.planning import chosen_layout, hardware_files


def train_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def losses(layout: str) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    step = tutti.distribute(train_step, model, torch.optim.Adam(model.parameters()), layout)
    x = torch.randn(4, 8)
    return str(step.layout), [step(x).item() for _ in range(3)]


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hardware_files.write(FOUND, tmp_path)
    monkeypatch.setenv("TUTTI_HARDWARE", str(tmp_path))
    return tmp_path


def test_one_rank_has_layouts_of_one_device(calibrated: Path) -> None:
    _, found = losses("auto remat=none")
    assert found == pytest.approx(losses("")[1], rel=1e-6)


def test_a_machine_without_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_HARDWARE", str(tmp_path))
    with pytest.raises(tutti.PlanError, match="has not been calibrated") as found:
        losses("auto")
    assert "give a layout of your own" in str(found.value)


@pytest.mark.parametrize("words", ["replica=2", "replica=2 sync=gossip()", "replica=2 server=1"])
def test_replicas_are_refused_before_the_plan(
    words: str, calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_layout, "answer", lambda *_: pytest.fail("planned"))
    with pytest.raises(tutti.PlanError, match="has replicas, which compute another step"):
        losses(f"auto {words}")


def _on_rank(folder: str) -> tuple[str, list[float]]:
    os.environ["TUTTI_HARDWARE"] = folder
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    step = tutti.distribute(
        train_step, model, torch.optim.Adam(model.parameters()), "auto data=2 micro=1 remat=none"
    )
    x = torch.randn(4, 8)
    found = [step(x).item() for _ in range(3)]
    return str(step.layout), found


def test_ranks_take_the_choice_of_the_first(calibrated: Path, ranks: Ranks) -> None:
    (first, found), (second, others) = ranks.run(_on_rank, str(calibrated), n=2)
    assert first == second
    assert "data=2" in first
    assert found == others == pytest.approx(losses("")[1], rel=1e-5)
