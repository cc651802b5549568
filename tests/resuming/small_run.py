"""A short float32 run that is saved and restored: `small_run.py FOLDER STEPS [SECONDS]`.

Its batches come from the global generator of torch, its learning rate from a schedule; it has a second
model's average, a count, and dropout. Each rank appends its losses, as they are in memory, to
FOLDER/../losses.R, a line `step loss` each.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import tutti

MOST_STEPS = 10_000
PLACE = {"0.weight": "tensor, -", "3.weight": "-, tensor"}
warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


class Counted:
    """Anything with a state."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "by parity": {k % 2: k for k, _ in self.seen}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["by parity"] == {k % 2: k for k, _ in state["seen"]}
        self.seen = state["seen"]


class SmallRun:
    """The run and its checkpoints; `options` are those of `Checkpoints`."""

    def __init__(self, folder: str | Path, layout: str | None = "", **options: Any) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh())
        self.model = nn.Sequential(*layers, nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 0.01, total_steps=MOST_STEPS
        )
        place = PLACE if "tensor=" in (layout or os.environ.get("TUTTI_LAYOUT", "")) else None
        self.step = tutti.distribute(train_step, self.model, self.optimizer, layout, place=place)
        self.counted, self.notes = Counted(), {"epoch": 0}
        self.average = AveragedModel(nn.Linear(2, 2))
        parts = {"schedule": self.schedule, "counted": self.counted, "notes": self.notes}
        self.checkpoints = tutti.Checkpoints(
            folder, step=self.step, average=self.average, **(parts | options)
        )

    def one(self) -> tuple[float, bool]:
        """A step: its loss, and whether the run should end."""
        x, y = torch.randn(12, 8), torch.randn(12, 4)
        loss = self.step(x, y)
        self.schedule.step()
        count = self.step.num_steps
        self.counted.seen.append((count, str(count)))
        self.notes["epoch"] = count // 4
        self.average.update_parameters(nn.Linear(2, 2))
        return loss.item(), self.checkpoints.tick(loss=loss)

    def tell_history(self, lines: IO[str]) -> None:
        """Write the losses of a restored run: a kill may come between a save and the line of its step."""
        history = self.checkpoints.history
        for step, loss in zip(history["step"], history.get("loss", []), strict=True):
            print(step, loss.hex(), file=lines, flush=True)

    def until(self, last: int) -> list[float]:
        """The losses of the next steps, up to step `last`."""
        return [self.one()[0] for _ in range(self.step.num_steps, last)]


def losses_of(folder: str, layout: str, last: int, options: dict[str, Any]) -> list[float]:
    """The losses up to step `last`, from the newest checkpoint on; for a rank of a pool."""
    from captured_once import captured_once  # a command does not find it

    run = SmallRun(folder, layout, **options)
    with captured_once("small run"), run.checkpoints as checkpoints:
        restored = checkpoints.restore()
        found = run.until(last)
    assert len(found) == last - (restored or 0)
    assert [k for k, _ in run.counted.seen] == checkpoints.history["step"] == [*range(1, last + 1)]
    assert checkpoints.history["loss"][-len(found) :] == found
    assert run.average.n_averaged.item() == last and run.notes == {"epoch": last // 4}
    return found


def with_writers(
    folder: str, layout: str, last: int, options: dict[str, Any], fresh: list[int]
) -> list[float]:
    """As `losses_of`; the processes that write are copies of ranks but for the `fresh` ones."""
    from forked_writers import forked_writers

    is_fresh = int(os.environ["RANK"]) in fresh
    with contextlib.nullcontext() if is_fresh else forked_writers():
        return losses_of(folder, layout, last, options)


def history_of(folder: str, layout: str, last: int, options: dict[str, Any]) -> list[float]:
    """As `losses_of`, with the losses before the restored checkpoint as it keeps them."""
    losses_of(folder, layout, last, options)
    run = SmallRun(folder, layout, **options)
    with run.checkpoints as checkpoints:
        assert checkpoints.restore() == last
        return checkpoints.history["loss"]


def main(folder: Path, last: int, seconds: float) -> None:
    """Train to step `last`, and end when told to."""
    run = SmallRun(folder, None, every=4)
    name = f"losses.{os.environ.get('RANK', '0')}"
    with run.checkpoints as checkpoints, (folder.parent / name).open("a") as lines:
        checkpoints.restore()
        run.tell_history(lines)
        while run.step.num_steps < last:
            loss, stop = run.one()
            print(run.step.num_steps, loss.hex(), file=lines, flush=True)
            if stop and "SMALL_RUN_GOES_ON" not in os.environ:
                break
            time.sleep(seconds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float((sys.argv[3:] or ["0"])[0]))
