"""A deep model on given devices: the estimate composed of its pieces, beside that of the whole program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.estimates.layout_estimate import Estimate, estimate
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.planning.step_estimates import StepEstimates


class DeepModel:
    """A step of a model on the meta device, with AdamW, captured once for all layouts of a precision."""

    def __init__(
        self, step: Any, make: Callable[[], nn.Module], batch: Tensor, devices: str, words: str = ""
    ) -> None:
        """`words` are of every layout."""
        with torch.device("meta"):
            model = make()
        self.words = words
        job = Job.of(step, model, torch.optim.AdamW(model.parameters()), Layout.parse(words))
        self.machine = PricedMachine.of(Cluster.parse(devices))
        self.estimates = StepEstimates(job, (batch,), lambda _: self.machine, num_layouts=100_000)
        self.programs = CandidatePrograms(job, (batch,), on_processors=False)

    def both(self, layout: str) -> tuple[Estimate, Estimate]:
        """The estimate composed of pieces, and that of the whole program."""
        parsed = Layout.parse(f"{layout} {self.words}")
        made = self.estimates.refined(parsed)
        assert self.estimates.composes == "layers"
        return made, estimate(self.programs.program(parsed), self.machine)
