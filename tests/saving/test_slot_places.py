"""A checkpoint with slots that an optimizer makes in a later call, loaded before the first call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti
from ranks import Ranks
from small_steps import step as train_step
from tutti.errors import CheckpointError

CALLS, SAVED = 7, 4


class Lookahead(torch.optim.Optimizer):
    """SGD with slow weights from the third call on, as that of timm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                slots = self.state[p]
                p.add_(p.grad, alpha=-group["lr"])
                if group["calls"] % 3 == 0:
                    if "slow" not in slots:
                        slots["slow"] = p.clone()
                    slots["slow"].lerp_(p, 0.5)
                    p.copy_(slots["slow"])


def made(layout: str, *, plain: bool = False) -> tuple[Any, nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
    kind = torch.optim.SGD if plain else Lookahead
    optimizer = kind(model.parameters())
    return tutti.distribute(train_step, model, optimizer, layout), model, optimizer


def losses(step: Any, first: int, last: int) -> list[float]:
    draws = [torch.Generator().manual_seed(call) for call in range(first, last)]
    return [float(step(torch.randn(8, 8, generator=g).double())) for g in draws]


def saved(layout: str, path: str) -> list[float]:
    step = made(layout)[0]
    before = losses(step, 0, SAVED)
    step.save(path)
    return before + losses(step, SAVED, CALLS)


def resumed(layout: str, path: str) -> tuple[list[float], bool]:
    """The losses after it, and whether the slow weights are as they were loaded."""
    step, model, optimizer = made(layout)
    step.load(path)
    assert step.num_steps == SAVED
    found = losses(step, SAVED, CALLS)
    with tutti.whole(model, slots=True):
        kept = all(optimizer.state[p]["slow"].shape == p.shape for p in model.parameters())
    return found, kept


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("data=2 zero=1", "pipe=2 micro=2"),
        ("pipe=2 micro=2", "data=2 zero=3"),
        ("data=2 zero=3", "data=2 zero=1"),
    ],
)
def test_it_goes_on_under_another_layout(
    ranks: Ranks, tmp_path: Path, layout: str, other: str
) -> None:
    path = str(tmp_path / "saved")
    expected = ranks.run(saved, layout, path, n=2)[0]
    for found, kept in ranks.run(resumed, other, path, n=2):
        np.testing.assert_allclose(found, expected[SAVED:], rtol=1e-10)
        assert kept
    np.testing.assert_allclose(resumed("", path)[0], expected[SAVED:], rtol=1e-10)


def test_a_state_dict(tmp_path: Path) -> None:
    step = made("")[0]
    losses(step, 0, SAVED)
    state = {k: v.clone() if torch.is_tensor(v) else v for k, v in step.state_dict().items()}
    expected = losses(step, SAVED, CALLS)
    other = made("")[0]
    other.load_state_dict(state)
    assert losses(other, SAVED, CALLS) == expected


def test_another_optimizer_is_refused_as_before(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    saved("", path)
    step, _, optimizer = made("", plain=True)
    with pytest.raises(CheckpointError, match="of another model or optimizer"):
        step.load(path)
    assert not any(optimizer.state.values())
