"""Losses whose weights and numbers change."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script
from benchmarks.programs.scripts.blocks import CLASSES, mlp, vectors

program = Register("losses")
_GLOBAL_STEP = 0


def _batches() -> list[tuple[Tensor, Tensor]]:
    dtype = torch.get_default_dtype()
    return [(x.to(dtype), y) for x, y in (vectors(i) for i in range(CALLS))]


def _adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


@program("mixup", "lam drawn by torch.distributions outside and given as a float; a permuted batch")
def mixup() -> Script:
    model, criterion = mlp(8, 16, CLASSES), nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor, lam: float) -> Tensor:
        index = torch.randperm(x.shape[0])
        mixed = lam * x + (1 - lam) * x[index]
        output = model(mixed)
        loss = lam * criterion(output, y) + (1 - lam) * criterion(output, y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    lams = torch.distributions.Beta(0.4, 0.4).sample((CALLS,)).tolist()
    batches = [(*pair, lam) for pair, lam in zip(_batches(), lams, strict=True)]
    return Script(train_step, model, optimizer, batches)


@program("mixup with NumPy", "lam = np.random.beta(...) in the step")
def mixup_numpy() -> Script:
    import numpy as np

    np.random.seed(0)
    model = mlp(8, 16, CLASSES)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        lam = np.random.beta(0.4, 0.4)
        output = model(lam * x + (1 - lam) * x.flip(0))
        loss = lam * F.cross_entropy(output, y) + (1 - lam) * F.cross_entropy(output, y.flip(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, _adam(model), _batches())


@program(
    "curriculum of loss weights", "a dataclass of weights, set by epoch; a term that begins later"
)
def curriculum() -> Script:
    @dataclass
    class Weights:
        main: float = 1.0
        aux: float = 0.0
        epoch: int = 0

    model, weights = (
        nn.ModuleDict({"body": mlp(8, 16), "a": nn.Linear(16, CLASSES), "b": nn.Linear(16, 8)}),
        Weights(),
    )

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        h = torch.tanh(model["body"](x))
        losses = {"main": F.cross_entropy(model["a"](h), y)}
        if weights.epoch >= 2:
            losses["aux"] = F.mse_loss(model["b"](h), x)
        total = sum(getattr(weights, name) * loss for name, loss in losses.items())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return losses

    def between(call: int) -> None:
        weights.epoch += 1
        weights.aux = 0.1 * weights.epoch

    return Script(train_step, model, _adam(model), _batches(), between)


@program("loss warm-up by a global step", "global_step += 1 in the module; a ramp that ends")
def warm_up() -> Script:
    global _GLOBAL_STEP
    _GLOBAL_STEP = 0
    model = mlp(8, 16, CLASSES)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        global _GLOBAL_STEP
        ramp = min(1.0, (_GLOBAL_STEP + 1) / 3)
        loss = ramp * F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _GLOBAL_STEP += 1
        return loss

    return Script(train_step, model, _adam(model), _batches(), watch=lambda: _GLOBAL_STEP)


@program(
    "a step with a config by partial",
    "functools.partial of keyword numbers; a dataclass as the batch",
)
def by_partial() -> Script:
    @dataclass
    class Batch:
        x: Tensor
        y: Tensor

    def train_step(model: Any, optimizer: Any, batch: Any, *, alpha: float, clip: float) -> Tensor:
        output = model(batch.x)
        loss = (1 - alpha) * F.cross_entropy(output, batch.y) + alpha * output.logsumexp(
            -1
        ).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    model, step = mlp(8, 16, CLASSES), functools.partial(train_step, alpha=0.1, clip=0.5)

    def between(call: int) -> None:
        step.keywords["alpha"] = 0.1 / (call + 1)

    return Script(step, model, _adam(model), [(Batch(x, y),) for x, y in _batches()], between)


@program(
    "focal loss with class weights", "weights of a criterion module recomputed between the calls"
)
def focal() -> Script:
    class Focal(nn.Module):
        def __init__(self, gamma: float = 2.0) -> None:
            super().__init__()
            self.gamma = gamma
            self.register_buffer("weight", torch.ones(CLASSES))

        def forward(self, logits: Tensor, y: Tensor) -> Tensor:
            logpt = F.log_softmax(logits, -1).gather(1, y[:, None]).squeeze(1)
            return (-((1 - logpt.exp()) ** self.gamma) * logpt * self.weight[y]).mean()

    model, criterion, batches = mlp(8, 16, CLASSES), Focal(), _batches()

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def between(call: int) -> None:
        counts = torch.bincount(batches[call][1], minlength=CLASSES).clamp(min=1)
        criterion.weight = counts.sum() / (CLASSES * counts)
        criterion.gamma += 0.5

    return Script(train_step, model, _adam(model), batches, between)


@program(
    "uncertainty weighting",
    "log variances of a criterion in a second group; a running mean it keeps",
)
def uncertainty() -> Script:
    class MultiTask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_vars = nn.Parameter(torch.zeros(2))
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, losses: list[Tensor]) -> Tensor:
            both = torch.stack(losses)
            self.mean = 0.9 * self.mean + 0.1 * both.detach()
            return (torch.exp(-self.log_vars) * both / (self.mean + 1) + self.log_vars).sum()

    model = nn.ModuleDict({"net": mlp(8, 16, CLASSES + 8), "weigh": MultiTask()})
    optimizer = torch.optim.AdamW(
        [{"params": model["net"].parameters()}, {"params": model["weigh"].parameters(), "lr": 0.1}],
        lr=1e-2,
    )

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = model["net"](x).split([CLASSES, 8], dim=1)
        loss = model["weigh"]([F.cross_entropy(a, y), F.mse_loss(b, x)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, optimizer, _batches())
