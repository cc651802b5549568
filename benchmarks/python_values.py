"""What it takes at each call to look at the Python values that a step reaches: microseconds, warm.

python -m benchmarks.python_values
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.command_line import parser
from tutti.calls.python_values import PythonValues

ROUNDS = 300


class Trainer:
    """A bound method as the step, with numbers that change inside and outside of it."""

    def __init__(self) -> None:
        self.count, self.beta, self.state = 0, 0.5, {"warm": 10, "scale": 1.0}

    def step(self, model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        self.count += 1
        loss = model(x).square().mean() * self.beta * self.state["scale"]
        if self.count < self.state["warm"]:
            loss = loss * (self.count / self.state["warm"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss


def train_step(model: nn.Module, optimizer: Any, tokens: Tensor) -> Tensor:
    loss = model(tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def microseconds(values: PythonValues) -> tuple[float, float]:
    """The least and the median of a call's look."""
    values.now()
    taken = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        values.now()
        taken.append(time.perf_counter() - begun)
    return min(taken) * 1e6, statistics.median(taken) * 1e6


def main() -> None:
    """A line for a small trainer, and one for a GPT-2 of 12 layers of Hugging Face."""
    parser(__doc__).parse_args()
    small = nn.Linear(4, 4)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=64, n_head=4, vocab_size=100))
    for name, step, model in (
        ("trainer", Trainer().step, small),
        ("GPT-2, 12 layers", train_step, gpt2),
    ):
        optimizer = torch.optim.AdamW(model.parameters())
        least, median = microseconds(PythonValues(step, model, [optimizer]))
        print(f"{name:18} {least:6.1f} us at least, {median:6.1f} us median")


if __name__ == "__main__":
    main()
