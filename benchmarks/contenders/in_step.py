"""Plain PyTorch on every rank, without a sum over ranks: they only wait for each other after each step.

Nobody would train so. It is what two ranks cost that compute on one machine and must keep in step: what they
share (caches, memory) and the slower one of each step, whose turn that is. Ranks that also sum gradients
take longer, unless they compute less.
"""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.contenders import eager
from benchmarks.contenders.contender import Contender, Place
from benchmarks.models import Case


class InStep:
    """A step, and a wait for all others to have done theirs."""

    def __init__(self, alone: Contender) -> None:
        self.alone = alone

    def step(self) -> float:
        """See `Contender`."""
        loss = self.alone.step()
        dist.barrier()
        return loss


def build(case: Case, place: Place) -> Contender:
    """Each rank has the model and the batch of `one`."""
    return InStep(eager.build(case, place))
