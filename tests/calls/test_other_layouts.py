"""Layouts that a step refuses: a run, `verify` and a plan say the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tutti
from reading_programs import skips_a_loss_that_is_not_finite
from tutti.errors import CaptureError, LayoutError
from tutti.job import Job
from tutti.layout import Layout
from tutti.planning.candidate_programs import CandidatePrograms

BRANCHING, *_ = skips_a_loss_that_is_not_finite()


@pytest.mark.parametrize(
    ("layout", "allowed"),
    [
        ("replica=2 sync=average(every=2)", "data=2 micro=2"),
        ("replica=2 pipe=2 sync=gossip(every=1)", "pipe=2 micro=2"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(layout: str, allowed: str) -> None:
    words = "branches on a value of a tensor, and replicas"
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.linspace(-1, 1, 32).reshape(8, 4),)
    programs = CandidatePrograms(Job.of(BRANCHING, model, optimizer, Layout()), batch)
    with pytest.raises(LayoutError, match=words):
        programs.program(Layout.parse(layout))
    with pytest.raises(CaptureError, match=words):
        tutti.verify(BRANCHING, model, optimizer, batch, layout)
    assert programs.program(Layout.parse(allowed)).layout.num_ranks >= 1
    assert tutti.verify(BRANCHING, model, optimizer, batch, allowed).ok
