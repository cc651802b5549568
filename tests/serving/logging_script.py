"""A run with servers whose step writes logs in Python: `logging_script.py DIRECTORY KIND`.

DIRECTORY/workerN.json has after each call the returned loss and the log; or the error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti

STEPS = 4


class Meter:
    """A sum over calls."""

    def __init__(self) -> None:
        self.total, self.count, self.last = 0.0, 0, 0.0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count
        self.last = value


METER, RECENT = Meter(), {"loss": 0.0, "kind": ""}


def update(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def logs(model: Any, optimizer: Any, x: Tensor, y: Tensor, log: dict[str, Any]) -> Tensor:
    """Writes an argument, a global and an object; reads none of them to compute."""
    out = model(x)
    loss = F.cross_entropy(out, y)
    update(optimizer, loss)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    log["loss"] = loss.item()
    log["norm"] = float(norm)
    log["right"] = log.get("right", 0) + (out.argmax(1) == y).sum().item()
    log.setdefault("all", []).append(loss.item())
    RECENT["loss"], RECENT["kind"] = loss.item(), "train"
    METER.update(loss.item(), len(y))
    return loss.detach()


def reads(model: Any, optimizer: Any, x: Tensor, y: Tensor, log: dict[str, Any]) -> Tensor:
    """Its next call computes with what this one has left."""
    loss = F.cross_entropy(model(x), y) * (1 + 0.1 * log.get("loss", 0.0))
    update(optimizer, loss)
    log["loss"] = loss.item()
    return loss.detach()


def decides(model: Any, optimizer: Any, x: Tensor, y: Tensor, log: dict[str, Any]) -> Tensor:
    """Its next call takes a branch by what this one has left."""
    loss = F.cross_entropy(model(x), y)
    if log.get("loss", 9.0) < 1.0:
        loss = loss * 2
    update(optimizer, loss)
    log["loss"] = loss.item()
    return loss.detach()


KINDS: dict[str, Callable[..., Tensor]] = {"logs": logs, "reads": reads, "decides": decides}


def batch_at(k: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(k)
    x = torch.randn(8, 4, generator=chance).double()
    return x, torch.randint(3, (8,), generator=chance)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def run(step: Callable[..., Tensor]) -> list[Any]:
    """The returned losses and the logs after each call."""
    vars(METER).update(vars(Meter()))
    RECENT.update(loss=0.0, kind="")
    log: dict[str, Any] = {}
    found = []
    for k in range(STEPS):
        loss = step(*batch_at(k), log).item()
        found.append([loss, json.loads(json.dumps(log)), dict(RECENT), dict(vars(METER))])
    return found


def main(directory: Path, kind: str) -> None:
    try:
        found: Any = run(tutti.distribute(KINDS[kind], *made()))
    except tutti.TuttiError as error:
        found = f"{type(error).__name__}: {error}"
    who = os.environ.get("TUTTI_ROLE", "one").replace(" ", "")
    (directory / f"{who}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
