"""Deep models of large layers: a weight larger than a bucket of many GPUs moves at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from small_steps import trained
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.passes.bucket import LARGE_BUCKET_NBYTES
from tutti.planner.estimates.layout_estimate import estimate
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.planning.step_estimates import StepEstimates

RANKS, TOKENS, WIDTH, HIDDEN = 512, 256, 8192, 28672


@trained
def step(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("layout", ["data=512 zero=3", "data=512 zero=1"])
def test_a_weight_larger_than_a_bucket_is_one(layout: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    assert WIDTH * HIDDEN * 2 > LARGE_BUCKET_NBYTES
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": 64}
    heads = {"num_key_value_heads": 8, "num_hidden_layers": 6, "vocab_size": 32768}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes, **heads))
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job.of(step, model, optimizer, Layout(precision="bf16"))
    batch = (torch.zeros(RANKS, TOKENS, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse(f"{RANKS} x h100"))
    estimates = StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)
    parsed = Layout.parse(f"{layout} precision=bf16")
    made = estimates.refined(parsed)
    assert estimates.composes == "layers"
    programs = CandidatePrograms(job, batch, on_processors=False)
    expected = estimate(programs.program(parsed), machine)
    assert made.seconds == pytest.approx(expected.seconds, rel=0.02)
    assert made.nbytes == pytest.approx(expected.nbytes, rel=0.01)
