"""Schedulers that Accelerate has prepared: each call moves them once a process.

Accelerate's processes have batches of their own, and a schedule counts batches. The batch of a step of tutti
is that of all ranks, as on one device.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from tutti.errors import CaptureError


def refuse_schedulers_of_processes(optimizers: Sequence[Optimizer]) -> None:
    """Raise `CaptureError` for a prepared scheduler of `optimizers`, if there are several processes."""
    for one in _prepared():
        held = {id(y) for x in one.optimizers for y in (x, getattr(x, "optimizer", None))}
        by_process = one.step_with_optimizer and not one.split_batches
        if not by_process or held.isdisjoint(map(id, optimizers)):
            continue
        if sys.modules["accelerate"].PartialState().num_processes > 1:
            raise CaptureError(
                "Accelerate moves this script's scheduler once for each process, at every call",
                why="its processes have batches of their own; the batch of this step is that of all ranks",
                fix="Accelerator(step_scheduler_with_optimizer=False); or do not prepare the scheduler",
            )


def _prepared() -> Iterator[Any]:
    """The prepared schedulers of this process, of which no optimizer knows."""
    module = sys.modules.get("accelerate.scheduler")
    if module is not None:
        kind = module.AcceleratedScheduler
        yield from (x for x in gc.get_objects() if type(x) is kind)
