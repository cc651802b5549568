"""A program for each replica on its rows of the batch; the replicas exchange weights in rounds."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tutti.calls.first_call import refuse_where_apart
from tutti.job import Job
from tutti.modes.plain import Plain
from tutti.saving import replica_checkpoint
from tutti.state.agreeing import Agreeing
from tutti.state.residence import whole_of
from tutti.torch_private.pytrees import tree_map_only
from tutti.verification.verify_replicas import compare_replicas


class Replicated(Plain):
    """Every rank plays its part of its replica's program."""

    compare = staticmethod(compare_replicas)

    def __init__(self, job: Job) -> None:
        self.agreeing = Agreeing(job)
        super().__init__(job, self.agreeing)

    def after(self) -> None:
        """Run the rounds that are due."""
        self.agreeing.after(self.running.num_steps)

    def rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """This replica's rows of the tensors of the global batch."""
        return self.agreeing.rows([whole_of(x) for x in tensors])

    def batch(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """This replica's rows of the global batch."""
        return self.agreeing.batch(tree_map_only(Tensor, whole_of, batch))

    def refuse_first_step(self) -> None:
        """Raise `CaptureError`: no replica has the whole batch of a step of one device."""
        refuse_where_apart(self.job.optimizer, self.job.layout)

    def start(self) -> None:
        """Start the strategy once; it continues from a checkpoint loaded before."""
        if self.agreeing.team is None:
            self.agreeing.start()
            replica_checkpoint.resume(self.running)
