"""Deep mixtures of experts composed of pieces, against the whole program of the same layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deep_models import DeepModel
from mixtures import mixture
from small_steps import trained

ROWS, TOKENS = 16, 512
SIZES = {
    "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096,
    "max_position_embeddings": TOKENS, "num_local_experts": 8,
}  # fmt: skip


@trained
def step(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.fixture(scope="module")
def model() -> DeepModel:
    batch = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    return DeepModel(step, lambda: mixture("Mixtral", **SIZES), batch, "16 x h100")


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
def test_experts_send_and_keep_what_the_whole_program_does(model: DeepModel, layout: str) -> None:
    """Over `expert` the gradients of all weights but the experts' add up."""
    made, expected = model.both(layout)
    assert made.nbytes == pytest.approx(expected.nbytes, rel=0.02)
    assert made.peak_nbytes == pytest.approx(expected.peak_nbytes, rel=0.1)
    assert made.seconds == pytest.approx(expected.seconds, rel=0.1)
