"""Short training runs of the zoo's cases, to be compared: in this process, or on the ranks of a pool.

All functions stand at module level and return plain numbers and arrays, so that a rank can send them.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

import tutti
import zoo
from zoo_steps import Batch

TOLERANCE = 1e-5
# Zoo cases whose dims do not divide are left whole, with a warning that is not what these runs test.
warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")


@dataclass
class Play:
    """A case under a layout, ready to take steps; batch k of the run is `batches[k % 2]`."""

    step: tutti.Step
    batches: list[Batch]
    scheduler: Any = None

    def losses(self, num_steps: int) -> list[float]:
        """The losses of the next `num_steps` steps."""
        found = []
        for _ in range(num_steps):
            batch = self.batches[self.step.num_steps % len(self.batches)]
            found.append(self.step(*batch).item())
            if self.scheduler is not None:
                self.scheduler.step()
        return found

    def whole_state(self) -> dict[str, NDArray[Any]]:
        """Every tensor of the state by name, put together from all ranks."""
        return {n: whole(x).numpy().copy() for n, x in self.step.state_dict().items()}


def whole(x: Tensor) -> Tensor:
    """All of a state tensor."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def prepare(name: str, layout: str = "", *, place: bool = True) -> Play:
    """Zoo case `name` under `layout`."""
    case = zoo.CASES[name]
    train_step, model, optimizer, batches = case.build()
    scheduler = case.scheduler(optimizer) if case.scheduler and optimizer else None
    step = tutti.distribute(
        train_step, model, optimizer, layout, place=case.place if place else None
    )
    return Play(step, batches, scheduler)


def train(name: str, layout: str, num_steps: int) -> tuple[list[float], dict[str, NDArray[Any]]]:
    """The losses of a run and the whole state after it."""
    play = prepare(name, layout)
    return play.losses(num_steps), play.whole_state()


@functools.cache
def on_one_device(name: str, num_steps: int) -> tuple[list[float], dict[str, NDArray[Any]]]:
    """The same run on one device."""
    return train(name, "", num_steps)


def train_and_save(name: str, layout: str, num_steps: int, path: str) -> list[float]:
    """Take steps and save; the losses."""
    play = prepare(name, layout)
    losses = play.losses(num_steps)
    play.step.save(Path(path), extra={"losses": losses})
    return losses


def resume(
    name: str, layout: str, num_steps: int, path: str
) -> tuple[list[float], dict[str, Any], dict[str, NDArray[Any]]]:
    """Load and take steps: the losses, the checkpoint's extra, the state at the end."""
    play = prepare(name, layout)
    extra = play.step.load(Path(path))
    return play.losses(num_steps), extra, play.whole_state()


def assert_same_losses(found: list[float], expected: list[float]) -> None:
    """Equal within 1e-5 relative, and as many."""
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=0)


def assert_same_state(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-4) -> None:
    """Every tensor close on the scale of its largest entry."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        scale = max(float(np.abs(x).max()), 1e-3) if x.size else 0.0
        np.testing.assert_allclose(found[name], x, rtol=0, atol=rtol * scale, err_msg=name)
