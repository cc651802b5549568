"""Models of Hugging Face find, in a trace as in eager mode, whether attention needs a mask."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from as_eager import Program, assert_as_eager
from tutti.capture.python import fake_checks
from tutti.capture.step import capture

WORDS, TOKENS = 32, 8


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def program(step: Callable[..., Any], *batch: Tensor) -> Program:
    model = llama()
    tokens = torch.randint(WORDS, (4, TOKENS))
    return step, model, torch.optim.SGD(model.parameters(), 0.1), (tokens, *batch)


def trained(model: Any, optimizer: Any, tokens: Tensor, **options: Any) -> Tensor:
    logits = model(input_ids=tokens, **options).logits
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def plain(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
    return trained(model, optimizer, tokens)


def counted(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
    """The positions, said by the step itself."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    return trained(model, optimizer, tokens, position_ids=positions)


def packed(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
    """Two sequences of 3 and 5 tokens in each row."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(tokens.shape[0], -1)
    return trained(model, optimizer, tokens, position_ids=positions)


def padded(model: Any, optimizer: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    return trained(model, optimizer, tokens, attention_mask=mask)


def at_positions(model: Any, optimizer: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    return trained(model, optimizer, tokens, position_ids=positions)


def padding() -> Tensor:
    lengths = torch.tensor([[8], [5], [3], [6]])
    return (torch.arange(TOKENS) < lengths).long()


def of_batch() -> Tensor:
    return torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(4, -1).contiguous()


def has_masks(made: Program) -> bool:
    """Whether attention of the captured step reads a mask."""
    step, model, optimizer, batch = made
    graph = capture(step, model, optimizer, batch).graph
    found = [n for n in graph.nodes if "attention_for_cpu.default" in str(n.target)]
    assert len(found) == 2
    is_causal = [n.args[4:5] == (True,) for n in found]
    masks = [isinstance(n.kwargs.get("attn_mask"), fx.Node) for n in found]
    assert is_causal == [not mask for mask in masks]
    return any(masks)


@pytest.mark.parametrize(
    ("step", "batch", "masked"),
    [
        (plain, (), False),
        (counted, (), False),
        (packed, (), True),
        (padded, (padding,), True),
        (at_positions, (of_batch,), True),
    ],
)
def test_a_mask_where_eager_mode_needs_one(
    step: Callable[..., Any], batch: tuple[Callable[[], Tensor], ...], masked: bool
) -> None:
    made = partial(program, step, *(make() for make in batch))
    assert has_masks(made()) is masked
    assert_as_eager(made)


def test_the_function_is_as_before() -> None:
    llama()
    (module, name), *_ = fake_checks.CHECKS
    before = getattr(sys.modules[module], name)
    assert not has_masks(program(plain))
    assert getattr(sys.modules[module], name) is before
