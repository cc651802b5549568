"""Chooses the mode of a job by its layout."""

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
    """The kind of mode of a training step under `layout`."""
    if layout.num_replicas == 1:
        return Plain
    return Served if layout.server else Replicated


def mode_of(job: Job) -> Mode:
    """The mode of `job`. Replicas of an evaluation exchange nothing: each sees the whole batch."""
    if optimizers_of(job.optimizer) or job.by_hand:
        return kind_of(job.layout)(job)
    return Evaluated(job) if job.layout.server else Plain(job)
