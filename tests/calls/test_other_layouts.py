"""Layouts that a step refuses: a run, `verify` and a plan say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from reading_programs import skips_a_loss_that_is_not_finite
from tutti.errors import CaptureError, LayoutError
from tutti.job import Job
from tutti.layout import Layout
from tutti.planning.candidate_programs import CandidatePrograms


def averaging() -> Callable[..., Tensor]:
    """Weights that the step keeps outside of its model: an average, as for diffusion models."""
    average = nn.Linear(4, 4).requires_grad_(False)

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.weight.lerp_(model[0].weight.detach(), 0.1)
        return loss.detach()

    return step


BRANCHING, *_ = skips_a_loss_that_is_not_finite()


@pytest.mark.parametrize(
    ("step", "layout", "words", "allowed"),
    [
        (BRANCHING, "pipe=2 micro=2", "branches on a value of a tensor, with pipe", "data=2"),
        (BRANCHING, "micro=2", "branches on a value of a tensor, with micro", "tensor=2"),
        (
            averaging(),
            "pipe=2 micro=2",
            r'changes "average.weight"[^$]*test_other_layouts.py:\d+  average.weight.lerp_',
            "data=2 micro=2",
        ),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(
    step: Any, layout: str, words: str, allowed: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.linspace(-1, 1, 32).reshape(8, 4),)
    programs = CandidatePrograms(Job.of(step, model, optimizer, Layout()), batch)
    with pytest.raises(LayoutError, match=words):
        programs.program(Layout.parse(layout))
    with pytest.raises(CaptureError, match=words):
        tutti.verify(step, model, optimizer, batch, layout)
    assert programs.program(Layout.parse(allowed)).layout.num_ranks >= 1
    assert tutti.verify(step, model, optimizer, batch, allowed).ok
