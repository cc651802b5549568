"""Two training steps under replicas, over one model or over the parts of one dict: on ranks, and in plain
PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from replicas_train import State, rows, state_of
from tutti.replicas.strategies import parse

Models = dict[str, nn.Module]


def critic_step(models: Models, optimizer: Any, x: Tensor, z: Tensor) -> Tensor:
    """A step that trains the critic alone."""
    fake = models["maker"](z).detach()
    loss = F.softplus(-models["critic"](x)).mean() + F.softplus(models["critic"](fake)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def maker_step(models: Models, optimizer: Any, x: Tensor, z: Tensor) -> Tensor:
    """A step that trains the maker alone, through the critic."""
    loss = F.softplus(-models["critic"](models["maker"](z))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def pair() -> tuple[Models, dict[str, torch.optim.Optimizer]]:
    """A maker with running statistics and a critic, each with an optimizer."""
    torch.manual_seed(0)
    maker = nn.Sequential(
        nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)
    ).double()
    critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    models: Models = {"maker": maker, "critic": critic}
    return models, {n: torch.optim.AdamW(m.parameters(), lr=0.01) for n, m in models.items()}


def fit_step(model: nn.Module, optimizer: Any, x: Tensor, z: Tensor) -> Tensor:
    """A step on all weights."""
    loss = F.mse_loss(model(z), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def shrink_step(model: nn.Module, optimizer: Any, x: Tensor, z: Tensor) -> Tensor:
    """Another step, on the weights of its optimizer."""
    loss = model(z).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def single(kind: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """One model, and an optimizer for each of two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)
    ).double()
    head = torch.optim.SGD(model[3].parameters(), lr=0.1)
    if kind == "simple":
        return model, [torch.optim.SGD(model.parameters(), lr=0.1), head]
    both = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, [both, both if kind == "shared" else head]


def batch_at(k: int) -> tuple[Tensor, Tensor]:
    """The global batch of a call."""
    chance = torch.Generator().manual_seed(k)
    return torch.randn(8, 8, generator=chance).double(), torch.randn(
        8, 4, generator=chance
    ).double()


# "pair": two models; "head", "simple": the second step trains some weights of the first; "shared": one
# optimizer for both.
Kind = str


def made(kind: Kind) -> tuple[Any, list[Any], list[Any]]:
    """The model, the steps and their optimizers."""
    if kind == "pair":
        models, optimizers = pair()
        return models, [critic_step, maker_step], [optimizers["critic"], optimizers["maker"]]
    model, optimizers = single(kind)
    return model, [fit_step, shrink_step], optimizers


def train(layout: str, kind: Kind, calls: str, path: str = "", saved: int = 0) -> list[State] | str:
    """On a rank: the state of both steps after each call, or the error.

    Args:
        calls: "0" or "1" for each call: the step.
        path: a folder; saves both steps after `saved` calls, and a second run loads both and continues.
    """
    model, steps, optimizers = made(kind)
    both = [tutti.distribute(s, model, o, layout) for s, o in zip(steps, optimizers, strict=True)]
    second = bool(path) and Path(path).exists()
    if second:
        for i, step in enumerate(both):
            step.load(f"{path}/{i}")
    found = []
    try:
        for k in range(saved if second else 0, len(calls)):
            both[int(calls[k])](*batch_at(k))
            found.append(state_of(both[0]) | {f"1.{n}": x for n, x in state_of(both[1]).items()})
            if path and not second and k + 1 == saved:
                for i, step in enumerate(both):
                    step.save(f"{path}/{i}")
    except tutti.TuttiError as error:
        return f"{type(error).__name__}: {error}"
    return found


class _Rounds:
    """The rounds of one step in plain PyTorch: those of the weights that it has trained since its last."""

    def __init__(
        self, sync: str, weights: list[dict[str, nn.Parameter]], buffers: list[Any]
    ) -> None:
        self.sync: Any = parse(sync)
        self.weights, self.buffers = weights, buffers
        self.count = 0
        self.theta = {n: p.detach().clone() for n, p in weights[0].items()}
        self.momentum = {n: torch.zeros_like(p) for n, p in self.theta.items()}
        self.pending: list[tuple[int, dict[str, Tensor], list[Tensor]]] = []

    @torch.no_grad()
    def after(self) -> None:
        """A call of all replicas has ended."""
        self.count += 1
        delay = getattr(self.sync, "delay", 0)
        if self.count % self.sync.every == 0:
            means = {n: torch.stack([w[n] for w in self.weights]).mean(0) for n in self.theta}
            buffers = [torch.stack(x).mean(0) for x in zip(*self.buffers, strict=True)]
            self.pending.append((self.count + delay, means, buffers))
        for _, means, buffers in [one for one in self.pending if one[0] == self.count]:
            for own in self.buffers:
                for b, mean in zip(own, buffers, strict=True):
                    b.copy_(mean)
            for n, mean in means.items():
                self._land(n, mean, keep=self.sync.alpha if delay else 0.0)
        self.pending = [one for one in self.pending if one[0] > self.count]

    def _land(self, n: str, mean: Tensor, *, keep: float) -> None:
        new = mean
        if hasattr(self.sync, "momentum"):
            d = self.theta[n] - mean
            self.momentum[n] = self.sync.momentum * self.momentum[n] + d
            new = self.theta[n] - self.sync.lr * (d + self.sync.momentum * self.momentum[n])
        self.theta[n] = new
        for w in self.weights:
            w[n].copy_(keep * w[n] + (1 - keep) * new)


def simulate(sync: str, kind: Kind, calls: str, count: int = 2) -> list[list[dict[str, Tensor]]]:
    """The weights and buffers of each replica after each call."""
    first = made(kind)
    replicas = [copy.deepcopy(first) for _ in range(count)]
    modules = [_module(model) for model, _, _ in replicas]
    buffers = [[b for b in m.buffers() if b.is_floating_point()] for m in modules]
    rounds = []
    for i in range(2):
        weights = []
        for module, (_, _, optimizers) in zip(modules, replicas, strict=True):
            given = {id(p) for g in optimizers[i].param_groups for p in g["params"]}
            weights.append({n: p for n, p in module.named_parameters() if id(p) in given})
        rounds.append(_Rounds(sync, weights, buffers))
    found = []
    for k, which in enumerate(map(int, calls)):
        for r, (model, steps, optimizers) in enumerate(replicas):
            steps[which](model, optimizers[which], *rows(list(batch_at(k)), r, count))
        rounds[which].after()
        found.append([{n: x.detach().clone() for n, x in m.state_dict().items()} for m in modules])
    return found


def _module(model: Any) -> nn.Module:
    return nn.ModuleDict(model) if isinstance(model, dict) else model


def load_one(
    layout: str, path: str, alone: int, first: int, saved: list[State]
) -> tuple[State, State]:
    """The model after the call of step `first`, if step `alone` has loaded a checkpoint, and no call was made
    before; and the same from the weights that this replica has `saved`, in plain PyTorch."""
    model, steps, optimizers = made("simple")
    both = [tutti.distribute(s, model, o, layout) for s, o in zip(steps, optimizers, strict=True)]
    both[alone].load(path)
    both[first](*batch_at(7))
    plain, steps, optimizers = made("simple")
    own = saved[dist.get_rank()]
    plain.load_state_dict({n: torch.tensor(own[n]) for n in plain.state_dict()})
    steps[first](plain, optimizers[first], *rows(list(batch_at(7)), dist.get_rank(), 2))
    return state_of(both[first]), {n: x.numpy() for n, x in plain.state_dict().items()}


def change_alone(layout: str) -> str:
    """The error if one rank changes a weight between an evaluation and the first step."""
    model, steps, optimizers = made("head")
    look = tutti.distribute(lambda model, z: model(z), model, layout=layout)
    step = tutti.distribute(steps[0], model, optimizers[0], layout)
    look(batch_at(0)[1])
    if dist.get_rank():
        with torch.no_grad():
            model[3].weight.add_(1.0)
    try:
        step(*batch_at(0))
    except tutti.TuttiError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
