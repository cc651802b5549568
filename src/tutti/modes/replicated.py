"""A program for each replica on its rows of the batch; the replicas exchange weights in rounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.calls.first_call import refuse_where_apart
from tutti.calls.sharded_batch import part_over, shard_of, shardings_of
from tutti.capture.python.assumed_values import Assumed
from tutti.job import Job
from tutti.layout import Sharding
from tutti.modes.compiled_program import Compiled
from tutti.modes.plain import OnRanks, Plain
from tutti.replicas.roster import Shapes
from tutti.saving import replica_checkpoint
from tutti.state.agreeing import Agreeing
from tutti.state.residence import whole_of
from tutti.verification.verify_replicas import compare_replicas


class Replicated(Plain):
    """Every rank plays its part of its replica's program."""

    compare = staticmethod(compare_replicas)

    def __init__(self, job: Job) -> None:
        self.agreeing = Agreeing(job)
        super().__init__(job, self.agreeing)

    def compile(
        self, batch: tuple[Any, ...], kind: Any, given: Mapping[str, float], assumed: Assumed | None
    ) -> Compiled[Any]:
        """As of `Plain`, once all replicas have come to it."""
        self.agreeing.trace(self.running.num_steps, self.running.divergence.anew)
        return super().compile(batch, kind, given, assumed)

    def begins(self, made: OnRanks) -> None:
        """Let weights join that this call trains first."""
        self.agreeing.before(self.running.num_steps + 1, made.trained, made.changed)

    def after(self) -> None:
        """Run the rounds that are due."""
        self.agreeing.after(self.running.num_steps)

    def shards(self, tensors: Sequence[Tensor]) -> dict[int, Sharding]:
        """By position, the shardings of this replica's rows of the tensors that arrive in shards."""
        mesh, own = self.job.layout.mesh, set(self.job.layout.stage_mesh)
        found = shardings_of(tensors, mesh).items()
        parts = {i: part_over("replica", sharding, mesh) for i, sharding in found}
        return {i: part for i, part in parts.items() if part is not None and part.axes <= own}

    def rows(self, tensors: list[Tensor], shards: Collection[int]) -> list[Tensor]:
        """This replica's rows of the tensors of the global batch."""
        cut = self.agreeing.rows(
            [_sized(x) if i in shards else whole_of(x) for i, x in enumerate(tensors)]
        )
        return [shard_of(x) if i in shards else cut[i] for i, x in enumerate(tensors)]

    def stand_ins(self, tensors: list[Tensor], shards: Collection[int]) -> list[Tensor]:
        """This replica's rows for the capture; those in shards have no values."""
        return self.agreeing.rows(super().stand_ins(tensors, shards))

    def refuse_first_step(self) -> None:
        """Raise `CaptureError`: no replica has the whole batch of a step of one device."""
        refuse_where_apart(self.job.optimizer, self.job.layout)

    def start(self, trained: Shapes) -> None:
        """Start the strategy once; it continues from a checkpoint loaded before."""
        if self.agreeing.team is None:
            self.agreeing.start(trained)
            replica_checkpoint.resume(self.running)


def _sized(x: Tensor) -> Tensor:
    """A tensor of the global size of `x`, without memory."""
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
