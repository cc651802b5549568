"""Plain PyTorch: the step as everybody writes it. `one` runs it alone; other peers wrap the model."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.contenders.contender import Batches, Contender, Place
from benchmarks.models import Case, optimizer


class Eager:
    """Forward, loss, backward, update, op by op."""

    def __init__(
        self, case: Case, model: nn.Module, opt: torch.optim.Optimizer, batches: Batches
    ) -> None:
        self.case, self.model, self.optimizer, self.batches = case, model, opt, batches

    def step(self) -> float:
        """See `Contender`."""
        loss = self.case.loss(self.model, *self.batches.next())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def prepare(_place: Place) -> None:
    """Wake torch up: its first step allocates things that are no model's."""
    layer = nn.Linear(64, 64)
    layer(torch.ones(8, 64)).sum().backward()
    optimizer(layer).step()


def build(case: Case, _place: Place) -> Contender:
    """One process with the work of one rank."""
    model = case.model()
    return Eager(case, model, optimizer(model), Batches(case, 1))
