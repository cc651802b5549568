"""A script for two hosts of two ranks: prints the total of `two_hosts.py`, and the losses of a GPT."""

from __future__ import annotations

import os

import torch

import tutti
from zoo_models import GPT
from zoo_steps import plain_step, token_batch

NUM_STEPS = 6
COLUMN, ROW = "tensor, -", "-, tensor"
PLACE = {"*.up.weight": COLUMN, "*.up.bias": "tensor", "*.down.weight": ROW}
PLACE |= {f"*.{name}.weight": COLUMN for name in "qkv"} | {"*.o.weight": ROW}
PLACE |= {f"*.{name}.bias": "tensor" for name in "qkv"}


def losses(layout: str) -> list[float]:
    """The same run with or without ranks, in float64."""
    torch.manual_seed(0)
    model = GPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    batches = [token_batch(which) for which in range(2)]
    step = tutti.distribute(plain_step, model, optimizer, layout, place=PLACE)
    return [step(*batches[k % 2]).item() for k in range(NUM_STEPS)]


if __name__ == "__main__":
    from two_hosts import total

    found = total(), *losses("data=2 tensor=2 zero=1")
    if os.environ["RANK"] == "0":
        print("found", *map(repr, found), flush=True)
