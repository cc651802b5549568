"""A running job: the shared state of its calls, and the meeting of its ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.calls.captures import Captures
from tutti.calls.divergence import Divergence
from tutti.calls.processors import refuse_unlike
from tutti.calls.python_values import PythonValues
from tutti.capture.state.lift import called_optimizers, optimizers_of
from tutti.comm.collectives.agree import check_order
from tutti.comm.collectives.payload import digest
from tutti.errors import CommError
from tutti.job import Job
from tutti.launch.ranks import ensure_process_group
from tutti.state.agreeing import Agreeing
from tutti.state.residence import run_device
from tutti.torch_private.pytrees import tree_flatten


class Running:
    """A job, its number of steps, and the Python values, captures and ranks that its calls share.

    Args:
        job: with the layout of this process.
        agreeing: the exchanges of its replicas, if it has any.
    """

    def __init__(self, job: Job, agreeing: Agreeing | None = None) -> None:
        self.job, self.agreeing = job, agreeing
        self.optimizers = optimizers_of(job.optimizer)
        self.python = PythonValues(job.train_step, job.model, called_optimizers(job.optimizer))
        self.captures = Captures(job.model, job.optimizer, self.python)
        name = getattr(job.train_step, "__name__", "the step")
        self.divergence = Divergence(name, job.layout)
        self.num_steps = 0
        self.begun = False  # whether all ranks have made a call

    def begin_together(self, batch: tuple[Any, ...]) -> None:
        """Check that all ranks are at this call, without a program for it, and have the same inputs."""
        job, several = self.job, ensure_process_group()
        if not job.layout.server:
            job.layout.check_ranks(dist.get_world_size() if several else 1)
        if self.begun:
            self.divergence.before_compiling()
        else:
            self.divergence.first()
            replicas = job.layout.num_replicas if not job.layout.server else 1
            refuse_unlike(replicas, run_device(job.model))
            _check_same_batch(batch, job.seed)
            self.begun = True
        job.refuse_empty(batch)


def _check_same_batch(batch: tuple[Any, ...], seed: int) -> None:
    """Check before the first step that all ranks have the same global batch."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    entries = [f"seed={seed}"]
    for i, x in enumerate(tree_flatten(batch)[0]):
        if isinstance(x, Tensor) and not isinstance(x, DTensor):
            entries.append(f"batch tensor {i}: {list(x.shape)} {x.dtype} sha256 {digest(x)}")
    try:
        check_order(entries)
    except CommError as error:
        why = error.why or error.what
        if "seed=" in why:
            fix = "one `seed` for all: random numbers are those of one device"
            raise CommError("the ranks were given different seeds", why=why, fix=fix) from None
        raise CommError(
            "the ranks were given different batches",
            why=why,
            fix="give every rank the same *global* batch (one seed, no DistributedSampler): "
            "each rank takes its own part of it",
        ) from None
