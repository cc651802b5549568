"""Which way a job runs: its layout says so."""

from __future__ import annotations

from tutti.capture.state.lift import optimizers_of
from tutti.job import Job
from tutti.layout import Layout
from tutti.modes.evaluated import Evaluated
from tutti.modes.mode import Mode
from tutti.modes.plain import Plain
from tutti.modes.replicated import Replicated
from tutti.modes.served import Served


def kind_of(layout: Layout) -> type[Mode]:
    """How a training step runs under `layout`."""
    if layout.num_replicas == 1:
        return Plain
    return Served if layout.server else Replicated


def mode_of(job: Job) -> Mode:
    """How `job` runs. Replicas of an evaluation agree on nothing: each sees the whole batch."""
    if optimizers_of(job.optimizer):
        return kind_of(job.layout)(job)
    return Evaluated(job) if job.layout.server else Plain(job)
