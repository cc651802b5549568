"""Models built on the meta device: initial weights that do not depend on the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tutti
import zoo
from captured_once import captured_once
from tutti.state.deferred import initial_values, is_deferred


def _deferred_gpt(layout: str) -> tuple[list[float], dict[str, Tensor]]:
    """Two losses and the final weights, whole, of a GPT in float64 built on the meta device."""
    case = zoo.CASES["gpt"]
    with torch.device("meta"):
        _, model, _, _ = case.build()
    model.double()
    train_step, _, _, batches = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tutti.distribute(train_step, model, optimizer, layout, place=case.place, seed=3)
    with captured_once("deferred gpt"):
        losses = [float(step(*batch)) for batch in batches[:2]]
    assert not is_deferred(model)
    whole = {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for n, p in model.named_parameters()
    }
    return losses, whole


@pytest.mark.parametrize("layout", ["data=2 zero=3", "tensor=2", "data=2 zero=1"])
def test_same_weights_on_one_and_two_ranks(ranks: Any, layout: str) -> None:
    one = ranks.after(_deferred_gpt, "")
    losses, whole = one.result
    for other_losses, other in one.run(_deferred_gpt, layout, n=2):
        assert other_losses == pytest.approx(losses, rel=1e-10)
        for name, value in whole.items():
            torch.testing.assert_close(other[name], value, rtol=1e-8, atol=1e-9)


def test_values_are_those_of_the_modules_own_initialization() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    values = {id(x): v for x, v in initial_values(model, 0, torch.device("cpu"))}
    first = values[id(model[0].weight)]
    bound = 64**-0.5
    assert first.abs().max() <= bound and first.abs().max() > 0.9 * bound
    assert torch.equal(values[id(model[1].running_var)], torch.ones(32))
    assert is_deferred(model)  # nothing but the values was made
    again = {id(x): v for x, v in initial_values(model, 0, torch.device("cpu"))}
    other = {id(x): v for x, v in initial_values(model, 1, torch.device("cpu"))}
    assert torch.equal(again[id(model[2].weight)], values[id(model[2].weight)])
    assert not torch.equal(other[id(model[2].weight)], values[id(model[2].weight)])


def test_hugging_face_initializes_its_own_modules() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    values = {id(x): v for x, v in initial_values(model, 0, torch.device("cpu"))}
    weight = values[id(model.model.layers[0].self_attn.q_proj.weight)]
    assert weight.std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert torch.equal(values[id(model.model.norm.weight)], torch.ones(32))
    inverse = values[id(model.model.rotary_emb.inv_freq)]
    assert torch.allclose(inverse, LlamaForCausalLM(config).model.rotary_emb.inv_freq)


def test_a_module_that_cannot_initialize_itself_is_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Scale())
    with pytest.raises(tutti.TuttiError, match=r'module "1" \(Scale\)[\s\S]*reset_parameters'):
        list(initial_values(model, 0, torch.device("cpu")))
