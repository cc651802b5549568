"""Deep mixtures of experts composed of pieces, against the whole program of the same layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mixtures import mixture
from small_steps import trained
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.estimates.layout_estimate import estimate
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.planning.step_estimates import StepEstimates

ROWS, TOKENS = 16, 512
SIZES = {
    "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096,
    "max_position_embeddings": TOKENS, "num_local_experts": 8,
}  # fmt: skip


@trained
def step(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.fixture(scope="module")
def estimates() -> StepEstimates:
    with torch.device("meta"):
        model = mixture("Mixtral", **SIZES)
    job = Job.of(step, model, torch.optim.AdamW(model.parameters()), Layout())
    batch = (torch.zeros(ROWS, TOKENS, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse("16 x h100"))
    return StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)


@pytest.fixture(scope="module")
def whole(estimates: StepEstimates) -> CandidatePrograms:
    return CandidatePrograms(estimates.job, estimates.batch, on_processors=False)


@pytest.mark.parametrize(
    "layout",
    [
        "data=2 expert=8",
        "data=2 expert=8 zero=1",
        "data=2 expert=4 zero=3",
        "data=2 expert=4 seq=2 zero=1",
        "data=4 expert=2 zero=2 micro=2",
    ],
)
def test_experts_send_and_keep_what_the_whole_program_does(
    estimates: StepEstimates, whole: CandidatePrograms, layout: str
) -> None:
    """Over `expert` the gradients of all weights but the experts' add up."""
    parsed = Layout.parse(layout)
    made = estimates.refined(parsed)
    assert estimates.composes == "layers"
    expected = estimate(whole.program(parsed), estimates.machine(parsed))
    assert made.nbytes == pytest.approx(expected.nbytes, rel=0.02)
    assert made.peak_nbytes == pytest.approx(expected.peak_nbytes, rel=0.1)
    assert made.seconds == pytest.approx(expected.seconds, rel=0.1)
