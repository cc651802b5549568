"""A run whose script uses a table that travels by row between its steps: `tables_script.py FILE HOW`.

Worker 0 writes the losses and what it has seen to FILE; without servers the only process does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti

SIZE, STEPS = 20_000, 4


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = (model(x) - x.double().sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def between(model: nn.Sequential, how: str, x: Tensor) -> float:
    """What the script does after a step; a number that it sees."""
    table: nn.Parameter = model[0].weight
    with torch.no_grad():
        if how == "normalizes":
            table.div_(table.norm(dim=1, keepdim=True))
        elif how == "data":
            table.data = F.normalize(table.data)
        elif how == "whole":
            with tutti.whole(model):
                table.data.mul_(0.5)
        if how != "looks" or os.environ.get("TUTTI_ROLE", "worker 0") == "worker 0":
            return model(x).sum().item()
    return 0.0


def main(path: Path, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(SIZE, 8), nn.Flatten(), nn.Linear(16, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = tutti.distribute(train_step, model, optimizer)
    seen = []
    for k in range(STEPS):
        x = torch.randint(50, (8, 2), generator=torch.Generator().manual_seed(k))
        seen += [step(x).item(), between(model, how, x)]
    if os.environ.get("TUTTI_ROLE", "worker 0") == "worker 0":
        path.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
