"""A script for `tutti plan`: a large model of Hugging Face on the meta device, for `planning_memory.py`.

tutti plan --devices "64 x h100" benchmarks/planned_model.py llama-8b
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from benchmarks.published_models import LLAMA_PLACE, make_model
from benchmarks.published_models import train_step as mixed_step
from benchmarks.published_rows import read_models

TOKENS = {"deepseek-v3": 4096}


def deepseek() -> nn.Module:
    """DeepSeek-V3, 671 billion parameters, experts looked up by an index."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(use_cache=False)
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        return DeepseekV3ForCausalLM(config)


def plain_step(model: Any, optimizer: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Forward, loss, backward, update."""
    logits = model(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def main() -> None:
    """Take the first step; a plan ends here."""
    name = sys.argv[1]
    tokens = torch.zeros((8, TOKENS.get(name, 8192)), dtype=torch.long)
    if name == "deepseek-v3":
        model, step, place = deepseek(), plain_step, None
    else:
        sizes = read_models()[name]
        model = make_model(sequence=8192, attention="fused", recompute="layers", **sizes)
        step, place = mixed_step, LLAMA_PLACE
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tutti.distribute(step, model, optimizer, place=place)(tokens, tokens)


main()  # nothing imports this file: `tutti plan` runs it
