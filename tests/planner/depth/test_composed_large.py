"""Deep models of large layers: a weight larger than a bucket of many GPUs moves at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deep_models import DeepModel
from small_steps import trained
from tutti.passes.bucket import LARGE_BUCKET_NBYTES

RANKS, TOKENS, WIDTH, HIDDEN = 512, 256, 8192, 28672


@trained
def step(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": 64}
    heads = {"num_key_value_heads": 8, "num_hidden_layers": 6, "vocab_size": 32768}
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes, **heads))


@pytest.fixture(scope="module")
def model() -> DeepModel:
    batch = torch.zeros(RANKS, TOKENS, dtype=torch.long)
    return DeepModel(step, _llama, batch, f"{RANKS} x h100", "precision=bf16")


@pytest.mark.parametrize("layout", ["data=512 zero=3", "data=512 zero=1"])
def test_a_weight_larger_than_a_bucket_is_one(model: DeepModel, layout: str) -> None:
    assert WIDTH * HIDDEN * 2 > LARGE_BUCKET_NBYTES
    made, expected = model.both(layout)
    assert made.seconds == pytest.approx(expected.seconds, rel=0.02)
    assert made.nbytes == pytest.approx(expected.nbytes, rel=0.01)
