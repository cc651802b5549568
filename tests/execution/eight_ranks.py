"""A short run that imports no model library, so that eight ranks of it start soon."""

from __future__ import annotations

import torch

import tutti
from captured_once import captured_once
from zoo_models import GPT
from zoo_steps import plain_step, token_batch

PLACE = {f"*.{name}.weight": "tensor, -" for name in ("q", "k", "v", "up")}
PLACE |= {f"*.{name}.weight": "-, tensor" for name in ("o", "down")}


def losses(layout: str, num_steps: int) -> list[float]:
    """The losses of a GPT with a tied weight and dropout, in float64."""
    torch.manual_seed(0)
    model = GPT(num_layers=1, dropout=0.1, tied=True).double()
    batches = [token_batch(which, rows=16) for which in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    step = tutti.distribute(plain_step, model, optimizer, layout, place=PLACE)
    with captured_once("eight ranks"):
        return [step(*batches[k % 2]).item() for k in range(num_steps)]
