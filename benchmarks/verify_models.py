"""Architectures of Hugging Face under layouts of every kind, compared with one device in float64.

    python -m benchmarks.verify_models                              # all of them, five minutes or so
    python -m benchmarks.verify_models --models LLaVA Swin --layouts "data=4" --out runs/models

A cell is `verify` of two steps (loss, backward, clipping, AdamW) of a small model with random weights: the
largest relative difference of any loss or state tensor. An op whose operands are gathered on every rank,
since it has no rule, is named. What is refused (BatchNorm in training cannot be cut into micro-batches) is
shown with its reason. Kept as a table and as JSON, written after each cell.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tutti
from benchmarks.architectures import ARCHITECTURES, Architecture
from benchmarks.cells import Cell, cell, write
from benchmarks.command_line import chosen, parser

LAYOUTS = ("data=2 zero=3", "data=2 micro=2", "pipe=2 micro=4")


def step_of(names: Sequence[str], named: Mapping[str, Any]) -> Callable[..., Tensor]:
    """The usual step of a model that works its loss out itself from inputs of these names."""

    def train_step(model: nn.Module, optimizer: Any, *inputs: Tensor) -> Tensor:
        loss = model(**dict(zip(names, inputs, strict=True)), **named).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return train_step


def verified(architecture: Architecture, layout: str) -> tuple[float, list[str]]:
    """The largest error, and the ops that are gathered."""
    model, inputs = architecture.build(), architecture.inputs()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = tutti.verify(
            step_of(list(inputs), architecture.named),
            model,
            optimizer,
            tuple(inputs.values()),
            layout,
        )
    texts = [str(w.message) for w in caught if "no rule says how" in str(w.message)]
    return found.max_error, [t.removeprefix("no rule says how ").split(" at ")[0] for t in texts]


def main() -> None:
    """Verify and keep."""
    options = {"models": list(ARCHITECTURES), "layouts": list(LAYOUTS)}
    command = parser(__doc__, **options, out=Path("runs/verify-models"))
    args = command.parse_args()
    chosen(command, "models", args.models, ARCHITECTURES)
    logging.disable(logging.WARNING)
    found: list[Cell] = []
    for name in args.models:
        for layout in args.layouts:
            one = cell(name, layout, lambda n=name, at=layout: verified(ARCHITECTURES[n], at))
            found.append(one)
            print(f"{name:18} {layout:18} {one} ({one.seconds:.1f} s)", flush=True)
            note = "small models with random weights, two steps"
            write(found, args.out, "Architectures verified in float64", note, rows="model")
    sys.exit(any(not c.ok and not c.error for c in found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
