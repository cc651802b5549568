"""Small models and steps that are awkward to split in time or into stages; all ordinary PyTorch.

`STACKS` names the programs; `subject` captures one for all tests.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import zoo
from tutti.layout import Layout
from tutti.verification.verdict import Subject, Verdict
from zoo_steps import IGNORED, Batch, cross_entropy, plain_step, update

# Rows of a batch: 2, 4, 7 and 14 divide them.
ROWS, DIM, DEPTH, NUM_CLASSES = 28, 8, 4, 4


def rows_batch(which: int) -> Batch:
    """Vectors [rows, dim] and classes; each batch ignores some rows, unevenly."""
    classes = torch.randint(0, NUM_CLASSES, (ROWS,))
    classes[: 5 + which] = IGNORED
    return torch.randn(ROWS, DIM), classes


class Stack(nn.Module):
    """`DEPTH` residual layers and a head: [rows, dim] -> [rows, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(DEPTH))
        self.head = nn.Linear(DIM, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Bare(nn.Module):
    """The same without modules inside: one forward that reads parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(0.3 * torch.randn(DEPTH, DIM, DIM))
        self.last = nn.Parameter(torch.randn(DIM, NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x @ self.last


class Thrice(Stack):
    """One weight at the beginning, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        for k in (DEPTH // 2, DEPTH - 1):
            self.layers[k].weight = self.layers[0].weight


class Common(Stack):
    """A frozen weight and a buffer that every layer reads, and a weight that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(0.3 * torch.randn(DIM, DIM), requires_grad=False)
        self.register_buffer("scale", torch.rand(DIM) + 0.5)
        self.unused = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x @ self.mixing) * self.scale)
        return self.head(x)


class Normed(nn.Module):
    """Batch norms, whose statistics are buffers that the step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(DEPTH))
        self.norms = nn.ModuleList(nn.BatchNorm1d(DIM) for _ in range(DEPTH))
        self.head = nn.Linear(DIM, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(norm(layer(x)))
        return self.head(x)


class Counting(Stack):
    """A buffer that counts calls, and one that follows the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x)


class Summed(nn.Module):
    """[rows, dim] -> sums over the rows, and those times a weight: what is summed is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.gain = nn.Parameter(torch.ones(NUM_CLASSES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = self.body(x).sum(0)
        return total, (total * self.gain).sum()


def summed_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    """A loss that is linear in a sum over samples, which is returned, too."""
    total, loss = model(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss, total


def telling_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    """Returns values of each sample, extremes over the batch, sums and counts."""
    logits = model(x)
    each = F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="none")
    loss = each.sum() / (y != IGNORED).sum()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    seen = logits.detach()
    return {
        "loss": loss,
        "norm": norm,
        "each": each,
        "classes": seen.argmax(-1),
        "turned": seen.t(),
        "highest": seen.amax(0),
        "lowest": seen.amin(),
        "right": (seen.argmax(-1) == y).sum(),
        "mean": seen.mean(0),
    }


def contrastive_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Every sample against every other one."""
    features = F.normalize(model(x), dim=-1)
    scores = features @ features.t()
    loss = F.cross_entropy(scores, torch.arange(len(x)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def penalty_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The gradient's own gradient: a forward that depends on a backward."""
    optimizer.zero_grad()
    x = x.detach().requires_grad_()
    loss = cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + slope.square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def decay_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A loss with a part that no sample has: the weights' squares."""
    loss = cross_entropy(model(x), y)
    decay = sum(p.square().sum() for p in model.parameters())
    total = (loss + 0.01 * decay) * 0.5
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    return total


def chunks_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Gradients accumulated by hand, over halves of the batch."""
    optimizer.zero_grad()
    count, total = (y != IGNORED).sum(), torch.zeros(())
    for some, classes in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.cross_entropy(model(some), classes, ignore_index=IGNORED, reduction="sum") / count
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def twice_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Two updates, the second on what the first one made."""
    update(model, optimizer, cross_entropy(model(x), y))
    return update(model, optimizer, cross_entropy(model(x), y))


STACKS = {
    "stack": (Stack, plain_step),
    "bare": (Bare, plain_step),
    "thrice": (Thrice, plain_step),
    "common": (Common, plain_step),
    "normed": (Normed, plain_step),
    "counting": (Counting, plain_step),
    "telling": (Stack, telling_step),
    "summed": (Summed, summed_step),
    "contrastive": (Stack, contrastive_step),
    "penalty": (Stack, penalty_step),
    "decay": (Stack, decay_step),
    "chunks": (Stack, chunks_step),
    "twice": (Stack, twice_step),
}


def built(name: str) -> zoo.Built:
    """The program `name`: step, model, optimizer, batches; always the same."""
    model, step = STACKS[name]
    return zoo.build(model, rows_batch, step, zoo.adamw)


@cache
def subject(name: str) -> Subject:
    """The program `name`, captured."""
    step, model, optimizer, batches = built(name)
    return Subject(step, model, optimizer, batches[0])


def verdict(name: str, layout: str) -> Verdict:
    """The verdict on the program `name` under `layout`."""
    return subject(name).verdict(Layout.parse(layout))
