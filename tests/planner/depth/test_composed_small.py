"""Deep models of small layers, whose kernels wait for launches, against the whole program of a layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_models import DeepModel
from small_steps import trained

ROWS, TOKENS, LAYERS = 16, 256, 8


@trained
def step(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def clipped(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    config = BertConfig(num_hidden_layers=LAYERS, vocab_size=4096, **sizes, **dropouts)
    return BertForMaskedLM(config)


def _gpt2() -> Any:
    """Heads and a vocabulary that 8 does not divide; the logits' weight is that of the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 384, "n_head": 12, "vocab_size": 50257, "n_positions": TOKENS}
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    return GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, use_cache=False, **sizes, **drops, **tokens))


@cache
def _deep(name: str) -> DeepModel:
    step_of, make = {"bert": (step, _bert), "gpt2": (clipped, _gpt2)}[name]
    return DeepModel(step_of, make, torch.zeros(ROWS, TOKENS, dtype=torch.long), "8 x h100")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("bert", "data=8 zero=3"),
        ("bert", "data=8 micro=2"),
        ("bert", "data=8 micro=2 zero=2"),
        ("gpt2", "data=8"),
        ("gpt2", "data=8 zero=1"),
    ],
)
def test_launches_of_casts_sums_and_updates_count(name: str, layout: str) -> None:
    made, expected = _deep(name).both(layout)
    assert made.seconds == pytest.approx(expected.seconds, rel=0.08)
    assert made.nbytes == pytest.approx(expected.nbytes, rel=0.01)


@pytest.mark.parametrize("layout", ["tensor=4 remat=full", "tensor=8 remat=full"])
def test_a_second_forward_sends_again(layout: str) -> None:
    """Results of collectives that stay are not kept twice."""
    made, expected = _deep("gpt2").both(layout)
    assert made.nbytes == pytest.approx(expected.nbytes, rel=0.02)
    assert made.peak_nbytes == pytest.approx(expected.peak_nbytes, rel=0.1)


@pytest.mark.parametrize("layout", ["tensor=8", "tensor=8 micro=2"])
def test_gradients_are_reduced_over_tensor_once(layout: str) -> None:
    """Also where their weight is stored in other parts than the forward has of it."""
    made, expected = _deep("gpt2").both(layout)
    assert made.nbytes == pytest.approx(expected.nbytes, rel=0.02)
