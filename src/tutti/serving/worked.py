"""A step on one rank of a worker: its part of the step as a program, and the generated code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from tutti.capture.python.findings import Findings
from tutti.environment import STRICT
from tutti.execution.allocator import give_back_now
from tutti.execution.checked import Checked
from tutti.execution.generate import generate
from tutti.execution.loops import Loops
from tutti.execution.profiling import ProgramProfile, program_profile
from tutti.graph.players.player import Player
from tutti.graph.randomness import random
from tutti.job import Job
from tutti.partition.partition import Program
from tutti.pipeline.timed import Timed
from tutti.server.split.program import in_slices, played, worker_layout, worker_program
from tutti.server.split.small_sums import SmallSums
from tutti.server.split.three_parts import Split, split
from tutti.server.split.updater import GraphUpdater
from tutti.server.split.worker_part import WorkerPart, alone, together
from tutti.serving.server_side import captured_for
from tutti.state.residences import residence_of


@dataclass
class Worked:
    """A step on this worker."""

    split: Split
    part: WorkerPart
    program: Program
    updater: GraphUpdater
    player: Player | None
    sums: SmallSums | None
    coordinates: Mapping[str, int]
    apart: bool
    donated: frozenset[str] = field(default_factory=frozenset)
    place: int = 0

    @cached_property
    def timed(self) -> Timed | None:
        """The program with its micro-batches one after the other, if it has any."""
        return in_slices(self.program)

    @property
    def _local(self) -> Program:
        return self.timed.programs[0] if self.timed else self.program

    @cached_property
    def _loops(self) -> Loops | None:
        owner, mesh = self.program.captured.owner, self.program.mesh
        if not self.timed:
            return None
        return Loops(owner, self.player, mesh, self.coordinates, {}, {}, self._profile)

    @cached_property
    def _profile(self) -> ProgramProfile | None:
        return program_profile()

    @cached_property
    def graph(self) -> fx.Graph:
        """The executed program."""
        return played(self._local, self.donated)

    @cached_property
    def _function(self) -> Callable[..., tuple[list[Any], list[Any]]]:
        owner, mesh = self.program.captured.owner, self.program.mesh
        given = (self.graph, owner, self.player, mesh, self.coordinates)
        made = generate(*given, loops=self._loops, profile=self._profile)
        give_back_now()
        return made.function

    def run(
        self, inputs: list[Any], seed: int, step: int, *, checked: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """(returned leaves, new buffers) for inputs; with `checked`, node by node."""
        if self.sums is not None:
            self.sums.begin()
        if checked:
            given = (self.player, self.coordinates, self._loops, seed, step)
            step_checked = Checked(self._local, *given)
            found = step_checked.run(inputs)
            if step_checked.came_in is not None:
                raise step_checked.came_in
            return found
        function = self._function
        if self._profile is not None:
            function = self._profile.timing(function, step)
        with torch.no_grad():
            return function(inputs, lambda stream: random.key(seed, stream, step))


def parts_of(
    job: Job,
    batch: tuple[Any, ...],
    tables: frozenset[str] | None = None,
    findings: Findings | None = None,
    *,
    apart: bool,
) -> tuple[Split, WorkerPart, Program]:
    """The split step (of `tables` only rows travel), the worker's part, and its program; `apart`: for a
    worker whose pushes are separate updates. `findings` as for `capture`."""
    made = split(captured_for(job, batch, findings, apart=apart), tables=tables)
    part = (alone if apart else together)(made)
    known = residence_of(job.model, job.layout).compute
    strict = STRICT.read()
    laid_out = worker_layout(job.layout, alone=apart)
    return made, part, worker_program(part, laid_out, job.place, known=known, strict=strict)
