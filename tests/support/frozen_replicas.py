"""Replicas whose weights are frozen and unfrozen between steps: on ranks, and in plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tutti
from replicas_train import State, batch_at, rows, state_of, train_step
from tutti.replicas.strategies import parse

# After a step: the layer, and whether it is trained from then on.
Script = dict[int, list[tuple[int, bool]]]


def make(frozen: tuple[int, ...], *, norm: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of three layers, some of them frozen, and SGD on all of them; with statistics if `norm`."""
    torch.manual_seed(0)
    fourth = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), fourth, nn.Linear(16, 4)]
    model = nn.Sequential(*layers).double()
    for k in frozen:
        model[k].requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def change(model: Any, script: Script, step: int) -> None:
    """Freeze and unfreeze what is due after `step`."""
    for layer, trained in script.get(step, []):
        model[layer].requires_grad_(trained)


def train(
    layout: str,
    frozen: tuple[int, ...],
    script: Script,
    steps: int,
    path: str = "",
    begin: int = 0,
    own: tuple[int, Script] = (-1, {}),
) -> list[State] | str:
    """On a rank: the state after each step, or the error.

    Args:
        path: where to save after `begin` steps, and load in a second run from there.
        own: a rank, and its own script.
    """
    model, optimizer = make(frozen, norm="pipe" not in layout)
    script = own[1] if dist.get_rank() == own[0] else script
    second = bool(path) and Path(path).exists()
    for k in range(1, begin + 1) if second else ():
        change(model, script, k)
    step = tutti.distribute(train_step, model, optimizer, layout)
    if second:
        step.load(path)
    found = []
    try:
        for k in range(begin if second else 0, steps):
            step(*batch_at(k))
            found.append(state_of(step))
            change(model, script, k + 1)
            if path and not second and k + 1 == begin:
                step.save(path)
    except tutti.TuttiError as error:
        return f"{type(error).__name__}: {error}"
    return found


def train_with_new_group(layout: str, added_after: int, steps: int) -> list[State]:
    """As `train`, with an optimizer that gets the first layer after some steps."""
    model, _ = make(())
    first, rest = list(model[0].parameters()), list(model[2:].parameters())
    optimizer = torch.optim.SGD(rest, lr=0.1)
    step = tutti.distribute(train_step, model, optimizer, layout)
    found = []
    for k in range(steps):
        step(*batch_at(k))
        found.append(state_of(step))
        if k + 1 == added_after:
            optimizer.add_param_group({"params": first})
    return found


def train_unlike(layout: str) -> str:
    """Train a layer that has got another value on each replica while it was frozen: the error."""
    model, optimizer = make((0,))
    step = tutti.distribute(train_step, model, optimizer, layout)
    try:
        for k in range(6):
            step(*batch_at(k))
            if k == 1:
                with torch.no_grad():
                    model[0].weight.add_(float(dist.get_rank()))
                model[0].requires_grad_(True)
    except tutti.TuttiError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Simulated:
    """All replicas in one process: local SGD and DiLoCo as the papers have them, weight by weight.

    A weight takes part in a round if a step has trained it since its last round began.
    """

    def __init__(self, sync: str, count: int, model: nn.Module) -> None:
        self.sync: Any = parse(sync)
        self.models = [copy.deepcopy(model) for _ in range(count)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.models]
        self.theta = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.momentum = {n: torch.zeros_like(p) for n, p in self.theta.items()}
        self.trained = dict.fromkeys(self.theta, 0)
        self.begun = dict.fromkeys(self.theta, 0)
        self.pending: list[tuple[int, int, dict[str, Tensor], list[Tensor]]] = []

    def step(self, k: int) -> None:
        """Step k of all replicas, and the round after it."""
        self.trained |= {n: k for n, p in self.models[0].named_parameters() if p.requires_grad}
        for r, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train_step(model, optimizer, *rows(list(batch_at(k - 1)), r, len(self.models)))
        with torch.no_grad():
            due = [one for one in self.pending if one[0] == k]
            self.pending = [one for one in self.pending if one[0] != k]
            if k % self.sync.every == 0:
                names = [n for n in self.theta if self.trained[n] > self.begun[n]]
                self.begun |= dict.fromkeys(names, k)
                weights = [dict(m.named_parameters()) for m in self.models]
                means = {n: torch.stack([w[n] for w in weights]).mean(0) for n in names}
                statistics = map(_statistics, self.models)
                buffers = [torch.stack(x).mean(0) for x in zip(*statistics, strict=True)]
                lands = k + getattr(self.sync, "delay", 0)
                (due if lands == k else self.pending).append((lands, k, means, buffers))
            for _, begun, means, buffers in due:
                self._land(begun, means, buffers)

    def _land(self, begun: int, means: dict[str, Tensor], buffers: list[Tensor]) -> None:
        for model in self.models:
            for b, mean in zip(_statistics(model), buffers, strict=True):
                b.copy_(mean)
        for n, mean in means.items():
            keep = 0.0
            if hasattr(self.sync, "momentum"):
                d = self.theta[n] - mean
                self.momentum[n] = self.sync.momentum * self.momentum[n] + d
                moved = d + self.sync.momentum * self.momentum[n]
                self.theta[n] = self.theta[n] - self.sync.lr * moved
                if self.sync.delay and self.trained[n] > begun:
                    keep = self.sync.alpha
            else:
                self.theta[n] = mean
            for model in self.models:
                p = dict(model.named_parameters())[n]
                p.copy_(keep * p + (1 - keep) * self.theta[n])


def _statistics(model: nn.Module) -> list[Tensor]:
    return [b for b in model.buffers() if b.is_floating_point()]


def simulate(
    sync: str, count: int, frozen: tuple[int, ...], script: Script, steps: int, *, norm: bool = True
) -> list[list[State]]:
    """The state of each replica after each step."""
    world = Simulated(sync, count, make(frozen, norm=norm)[0])
    found = []
    for k in range(1, steps + 1):
        world.step(k)
        found.append(
            [{n: x.numpy().copy() for n, x in m.state_dict().items()} for m in world.models]
        )
        for model in world.models:
            change(model, script, k)
    return found
