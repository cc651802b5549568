"""Steps without an optimizer that train weights by hand: `p.data.add_(p.grad, alpha=-lr)`.

Replicas split the batch of a training step, and run an evaluation whole. Only a trace shows which of both a
step without an optimizer is. New weights made of the batch are training; an average of weights, or a clamp,
needs no samples.
"""

from __future__ import annotations

from typing import Any

from tutti.capture.captured import Captured
from tutti.capture.state.lift import optimizers_of
from tutti.errors import CaptureError
from tutti.graph.analysis.order import ancestors
from tutti.job import Job


class TrainsByHand(CaptureError):
    """Ends the capture of an evaluation: the step is a training step, and replicas must split its batch."""


def refuse_as_evaluation(job: Job, captured: Captured) -> None:
    """Raise `TrainsByHand` if replicas would each run the whole batch of a step that trains."""
    if job.layout.num_replicas == 1 or job.by_hand or optimizers_of(job.optimizer):
        return
    if name := _trained(captured):
        raise TrainsByHand(f'the step trains "{name}" without an optimizer')


def _trained(captured: Captured) -> str:
    """The first parameter whose new value depends on the batch; or ""."""
    both: Any = captured.graph.output_node().args[0]
    for name, new in zip(captured.updated, both[1], strict=True):
        made_of = ancestors([new]) if captured.kinds[name] == "parameter" else ()
        if any(n.meta.get("kind") == "batch" for n in made_of):
            return name
    return ""
