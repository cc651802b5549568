"""A script that trains, saves and resumes, and in which others break something: `train.py DIRECTORY STEPS`.

Each process notes its number in DIRECTORY. After every third step all save to DIRECTORY/checkpoint, and the
first rank notes in DIRECTORY/saved how many steps the save holds. DIRECTORY/fail.rankR lets rank R raise.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti

SAVE_EVERY = 3


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same first weights in every process."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh()
    model = nn.Sequential(*layers, nn.Linear(32, 4)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch_at(k: int) -> tuple[Tensor, Tensor]:
    """The global batch of step k."""
    g = torch.Generator().manual_seed(k)
    return tuple(torch.randn(12, n, generator=g, dtype=torch.float64) for n in (8, 4))  # type: ignore[return-value]


def place(layout: str) -> dict[str, str] | None:
    """Splits of the weights where there is an axis for them."""
    return {"0.weight": "tensor, -", "3.weight": "-, tensor"} if "tensor=" in layout else None


def main(directory: Path, steps: int) -> None:
    """Train to step `steps`, from the checkpoint if there is one."""
    who = os.environ.get("TUTTI_ROLE", f"rank {os.environ.get('RANK', 0)}").replace(" ", "")
    (directory / f"{who}.pid").write_text(str(os.getpid()))
    layout = os.environ.get("TUTTI_LAYOUT", "")
    step = tutti.distribute(train_step, *make(), place=place(layout))
    losses: list[float] = []
    if (directory / "checkpoint" / "tutti.json").exists():
        losses = step.load(directory / "checkpoint")["losses"]
    while step.num_steps < steps:
        if (directory / f"fail.{who}").exists():
            raise ValueError("a batch of the wrong kind")
        losses.append(step(*batch_at(step.num_steps)).item())
        if step.num_steps % SAVE_EVERY == 0:
            step.save(directory / "checkpoint", {"losses": losses})
            if os.environ.get("RANK", "0") == "0":
                note(directory / "saved", str(step.num_steps))
        note(directory / f"{who}.step", str(step.num_steps))
        time.sleep(0.02)
    note(directory / f"{who}.losses", json.dumps(losses))


def note(file: Path, text: str) -> None:
    """Write all of a small file at once."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
