"""A run whose loader has two workers, until a signal ends it: `with_workers.py FOLDER`."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti


def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def main(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner of tests may ignore it
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), 0.01), "")
    loader = tutti.loader(torch.randn(40_000, 4), 4, num_workers=2)
    run = tutti.Checkpoints(folder, step=step, loader=loader)
    for x in loader:
        step(x)
        time.sleep(0.01)  # a signal meets a loop that waits for no batch, and one that does
        if run.tick():
            break
        if step.num_steps == 3:
            print("begun", flush=True)
    print("ended", run.steps() == [step.num_steps], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
