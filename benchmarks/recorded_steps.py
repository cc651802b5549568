"""What the records of a report cost: microseconds of each call, and seconds once.

python -m benchmarks.recorded_steps --rounds 40

Calls with and without records alternate in blocks, in one process; a figure is the least processor time of a
block, which other processes disturb least. Once: the facts of the program, and the call whose memory is
measured, less a plain call.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import tutti
from benchmarks.command_line import parser
from tutti.environment import PREDICTION, REPORT

BLOCK_SECONDS = 0.1


def small_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def gpt_step(model: nn.Module, optimizer: Any, tokens: Tensor) -> Tensor:
    loss = model(tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def cases() -> dict[str, tuple[Callable[..., Any], nn.Module, Tensor]]:
    """A step that is nearly all overhead, and a GPT-2 of 4 layers."""
    small = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    config = GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=256, bos_token_id=None, eos_token_id=None
    )
    tokens = torch.randint(0, 256, (8, 64))
    return {
        "two linear layers": (small_step, small, torch.ones(16, 32)),
        "GPT-2, 4 layers": (gpt_step, GPT2LMHeadModel(config).train(), tokens),
    }


def seconds_of_calls(step: tutti.Step, x: Tensor, rounds: int) -> tuple[float, float]:
    """The least processor seconds of a call without records, and with them."""
    watch, found = step._watch, ([], [])
    begun = time.perf_counter()
    step(x)
    count = max(3, round(BLOCK_SECONDS / (time.perf_counter() - begun)))
    for turn in range(2 * rounds):
        step._watch = watch if turn % 2 else None
        begun = time.process_time()
        for _ in range(count):
            step(x)
        found[turn % 2].append((time.process_time() - begun) / count)
    return min(found[0]), min(found[1])


def seconds_once(step: tutti.Step, x: Tensor) -> tuple[float, float]:
    """The seconds of the facts, and of a measured call."""
    assert step._last is not None
    begun = time.perf_counter()
    step._last.facts()
    facts = time.perf_counter() - begun
    begun = time.perf_counter()
    step.measure(x)
    return facts, time.perf_counter() - begun


def main() -> None:
    """A line for each step."""
    args = parser(__doc__, rounds=40).parse_args()
    os.environ[PREDICTION.name] = "0"
    with tempfile.TemporaryDirectory() as folder:
        os.environ[REPORT.name] = folder
        for name, (function, model, x) in cases().items():
            step = tutti.distribute(function, model, torch.optim.AdamW(model.parameters()))
            begun = time.perf_counter()
            for _ in range(10):
                step(x)
            first = time.perf_counter() - begun
            plain, recorded = seconds_of_calls(step, x, args.rounds)
            facts, measured = seconds_once(step, x)
            print(
                f"{name:18} {plain * 1e6:8.1f} us a call, {(recorded - plain) * 1e6:+.1f} us with records "
                f"({recorded / plain - 1:+.1%}); once {facts:.2f} s for the facts and "
                f"{measured - plain:.2f} s for the measured call, of {first:.1f} s for the first 10 calls"
            )
        sys.stdout.flush()
        os.environ.pop(REPORT.name)


if __name__ == "__main__":
    main()
