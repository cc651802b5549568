"""Short training runs of the zoo's cases, to be compared: in this process, or on the ranks of a pool.

They are in float64 throughout, so that a right program is below 1e-10 on any processor and a wrong one far
above it. `wide=False` plays a case in its own dtypes; `sensitivity` says what may then be asked for.

All functions stand at module level and return plain numbers and arrays, so that a rank can send them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tutti
import zoo
from captured_once import captured_once
from wide import wide_step, widened
from zoo_steps import Batch

TOLERANCE = 1e-10
EPSILON = 2.0**-23
# One rounding of each weight stands for those of all results that depend on it.
ROUNDINGS = 10
# Zoo cases whose dims do not divide are left whole, with a warning that is not what these runs test.
warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")


@dataclass
class Play:
    """A case under a layout, ready to take steps; batch k of the run is `batches[k % 2]`."""

    step: tutti.Step
    batches: list[Batch]
    scheduler: Any = None

    def losses(self, num_steps: int, program: Hashable = None) -> list[float]:
        """The losses of the next `num_steps` steps; equal programs of a name share a capture."""
        found = []
        with captured_once(program) if program else contextlib.nullcontext():
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


def prepare(name: str, layout: str = "", *, place: bool = True, wide: bool = True) -> Play:
    """Zoo case `name` under `layout`."""
    case = zoo.CASES[name]
    train_step, model, optimizer, batches = case.build()
    if wide:
        train_step, batches = wide_step(train_step), list(widened(model, *batches))
    scheduler = case.scheduler(optimizer) if case.scheduler and optimizer else None
    step = tutti.distribute(
        train_step, model, optimizer, layout, place=case.place if place else None
    )
    return Play(step, batches, scheduler)


def train(
    name: str, layout: str, num_steps: int, wide: bool = True
) -> tuple[list[float], dict[str, NDArray[Any]]]:
    """The losses of a run and the whole state after it."""
    play = prepare(name, layout, wide=wide)
    return play.losses(num_steps, (name, wide)), play.whole_state()


def train_unplaced(
    name: str, layout: str, num_steps: int
) -> tuple[list[float], dict[str, NDArray[Any]]]:
    """As `train`, without the case's `place`: a search finds one."""
    play = prepare(name, layout, place=False)
    return play.losses(num_steps, (name, True)), play.whole_state()


@functools.cache
def on_one_device(
    name: str, num_steps: int, wide: bool = True
) -> tuple[list[float], dict[str, NDArray[Any]]]:
    """The same run on one device."""
    return train(name, "", num_steps, wide)


def plainly(
    name: str,
    num_steps: int,
    *,
    wide: bool = True,
    rounding: Callable[[nn.Module], None] | None = None,
) -> list[float]:
    """The losses of the same run in plain PyTorch; `rounding` changes the weights before each step."""
    case = zoo.CASES[name]
    train_step, model, optimizer, batches = case.build()
    assert optimizer is not None
    if wide:
        train_step, batches = wide_step(train_step), list(widened(model, *batches))
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    found = []
    for k in range(num_steps):
        if rounding is not None:
            rounding(model)
        found.append(train_step(model, optimizer, *batches[k % len(batches)]).item())
        if scheduler is not None:
            scheduler.step()
    return found


@functools.cache
def sensitivity(name: str, num_steps: int, num_runs: int = 3) -> float:
    """How far rounding carries the float32 losses of a case, relative: the largest of a few runs in which
    each weight is changed before each step by up to one unit of its last place, at random.

    What two right programs may differ by is of this size: both round each result of each op, in another
    order. So a float32 comparison asks for `ROUNDINGS` times as much, and only of cases where that is little.
    """
    exact = np.array(plainly(name, num_steps, wide=False))
    worst = EPSILON  # of the loss itself
    for seed in range(num_runs):
        chance = torch.Generator().manual_seed(seed)

        def rounding(model: nn.Module, chance: torch.Generator = chance) -> None:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + (2 * torch.rand(p.shape, generator=chance) - 1) * EPSILON)

        found = np.array(plainly(name, num_steps, wide=False, rounding=rounding))
        worst = max(worst, float((np.abs(found - exact) / np.abs(exact)).max()))
    return worst


def train_and_save(
    name: str, layout: str, num_steps: int, path: str, wide: bool = True
) -> list[float]:
    """Take steps and save; the losses."""
    play = prepare(name, layout, wide=wide)
    losses = play.losses(num_steps, (name, wide))
    play.step.save(Path(path), extra={"losses": losses})
    return losses


def resume(
    name: str, layout: str, num_steps: int, path: str, wide: bool = True
) -> tuple[list[float], dict[str, Any], dict[str, NDArray[Any]]]:
    """Load and take steps: the losses, the checkpoint's extra, the state at the end."""
    play = prepare(name, layout, wide=wide)
    extra = play.step.load(Path(path))
    # One device captures after it has loaded; ranks, which are many, do so once a model.
    losses = play.losses(num_steps, (name, wide) if layout else None)
    return losses, extra, play.whole_state()


def assert_same_losses(found: list[float], expected: list[float], rtol: float = TOLERANCE) -> None:
    """Equal within `rtol` relative, and as many."""
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=0)


def assert_same_state(
    found: dict[str, Any], expected: dict[str, Any], rtol: float = 10 * TOLERANCE
) -> None:
    """Every tensor close on the scale of its largest entry."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        scale = max(float(np.abs(x).max()), 1e-3) if x.size else 0.0
        np.testing.assert_allclose(found[name], x, rtol=0, atol=rtol * scale, err_msg=name)
