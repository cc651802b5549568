"""`torch.distributed.pipelining`.

As https://docs.pytorch.org/docs/stable/distributed.pipelining.html says: the model is cut into modules by
hand, a `PipelineStage` on each rank, an optimizer for each stage, `Schedule1F1B`. The cut between blocks is
the one that leaves the larger part of the weights of linear layers smallest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.contenders.contender import Batches, Contender, Place
from benchmarks.models import Case, optimizer


class First(nn.Module):
    """Embeddings and the first blocks: tokens [batch, seq] -> [batch, seq, width]."""

    def __init__(self, model: nn.Module, num_blocks: int) -> None:
        super().__init__()
        self.embed, self.position = model.embed, model.position
        self.blocks = nn.ModuleList(list(model.blocks)[:num_blocks])  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))  # type: ignore[operator]
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    """The other blocks, norm and head: [batch, seq, width] -> logits [batch, seq, vocab]."""

    def __init__(self, model: nn.Module, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(list(model.blocks)[num_blocks:])  # type: ignore[arg-type]
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[operator]


class Pipelined:
    """One rank's stage with its schedule and its optimizer."""

    def __init__(self, case: Case, place: Place) -> None:
        model: Any = case.model()
        count = first_blocks(model)
        self.is_last = place.rank == place.num_ranks - 1
        self.model = Last(model, count) if self.is_last else First(model, count)
        stage = PipelineStage(self.model, place.rank, place.num_ranks, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, case.in_micro, loss_fn=_loss)
        self.optimizer = optimizer(self.model)
        self.batches = Batches(case, 1)

    def step(self) -> float:
        """See `Contender`; the last rank has the loss, so the mean over ranks takes it twice."""
        inputs, targets = self.batches.next()
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if self.is_last:
            self.schedule.step(target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(inputs, return_outputs=False)
        self.optimizer.step()
        return 2 * float(torch.stack(losses).detach().mean()) if self.is_last else 0.0


def first_blocks(model: Any) -> int:
    """How many blocks stand in the first stage."""

    def size(module: nn.Module) -> int:
        return sum(x.weight.numel() for x in module.modules() if isinstance(x, nn.Linear))

    sizes = [size(block) for block in model.blocks]
    ends = size(model.head)
    counts = range(1, len(sizes))
    return min(counts, key=lambda n: max(sum(sizes[:n]), sum(sizes[n:]) + ends))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def build(case: Case, place: Place) -> Contender:
    """Each rank has a stage; the first is given the batch, the last the targets."""
    return Pipelined(case, place)
