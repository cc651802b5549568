"""A step whose replicas exchange weights: chooses the tensors, and the steps of the rounds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutti.capture.state.lift import StateTensor, optimizers_of, state_of
from tutti.comm.collectives.fresh_group import fresh_group
from tutti.comm.collectives.group import Group
from tutti.environment import RUN_DIR
from tutti.job import Job
from tutti.launch.records import ReplicaJoined, write_record
from tutti.launch.telling import tell
from tutti.replicas import replica_rows, strategies
from tutti.replicas.roster import Shapes
from tutti.replicas.strategy import AVERAGED
from tutti.replicas.team import Team
from tutti.state.residence import local_of, run_device, set_local
from tutti.state.residences import residence_of


class Agreeing:
    """The exchanges of one step's replicas; does nothing before the step's first call.

    They exchange the parameters of the step's optimizers that its programs update. Such a parameter joins
    before the first call of such a program. A mean over all replicas includes floating buffers (running
    statistics); each replica keeps its own optimizer slots.

    `saving` has the groups of ranks that save together, by their replicas.
    `unread` is a checkpoint to resume from once the first call has laid out the state.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.layout = job, job.layout
        self.strategy = strategies.parse(job.layout.sync)
        self.team: Team | None = None
        self.saving: dict[tuple[int, ...], Group] = {}
        self.unread: Path | None = None

    @property
    def replica(self) -> int:
        """This rank's replica; 0 before there are ranks."""
        return replica_rows.replica_here(self.layout.mesh)

    def rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """This replica's rows of the global batch."""
        return replica_rows.rows(tensors, self.replica, self.layout.num_replicas)

    def start(self) -> None:
        """Begin the strategy after the layout of the state; all ranks call together."""
        self.team = Team(self.strategy, self.layout.mesh, run_device(self.job.model), _tell)
        self.team.start({s.name: local_of(s.tensor) for s in self.here()})
        self._make_groups()
        if run_dir := RUN_DIR.read():
            write_record(Path(run_dir), ReplicaJoined(dist.get_rank(), self.replica))

    def _make_groups(self) -> None:
        """Make the groups for saves of all replicas, and of this one alone.

        It may lose all others at once, and the run's store with them.
        """
        replicas = range(self.layout.num_replicas)
        self.saving[tuple(replicas)] = fresh_group(self.ranks_of(replicas))
        self.saving[self.replica,] = fresh_group(self.ranks_of([self.replica]))

    def ranks_of(self, replicas: Collection[int]) -> list[int]:
        """The ranks of these replicas, ascending."""
        mesh = self.layout.mesh
        return [r for r in range(mesh.num_ranks) if mesh.coordinates(r)["replica"] in replicas]

    def before(self, step: int, trained: Shapes) -> None:
        """Let the parameters join that `step` trains first; `trained` are all that it trains."""
        assert self.team is not None
        self.team.before(step, trained, self.weights)

    def after(self, num_steps: int) -> None:
        """Run the exchanges that are due after this number of steps."""
        assert self.team is not None
        if not self.team.is_due(num_steps):
            return
        weights, buffers = self.weights(), self.buffers()
        with torch.no_grad():
            changed = self.team.after(num_steps, weights, buffers)
        tensors = {s.name: s.tensor for s in state_of(self.job.model, None)}
        for name, value in changed.items():
            if value is not weights.get(name) and name in tensors:
                set_local(tensors[name], value)

    def restart(self) -> None:
        """Reset the strategy's state after a replacement of the weights."""
        self.unread = None
        if self.team is not None:
            self.team.restart()

    def weights(self) -> dict[str, Tensor]:
        """This rank's part of the parameters, exchanged or not."""
        return {s.name: local_of(s.tensor) for s in self.here() if s.kind == "parameter"}

    def buffers(self) -> dict[str, Tensor]:
        """This rank's part of the running statistics."""
        kept = [s for s in self.here() if s.kind == "buffer" and _averaged(s)]
        return {s.name: local_of(s.tensor) for s in kept}

    def here(self) -> list[StateTensor]:
        """This rank's state: in a pipeline, that of its pipeline rank."""
        home = residence_of(self.job.model, self.layout)
        pipe_rank = self.layout.mesh.coordinates(dist.get_rank()).get("pipe", 0)
        state = state_of(self.job.model, self.job.optimizer)
        return [s for s in state if home.keeper(s.name, pipe_rank) == pipe_rank]


def trained(model: nn.Module, optimizer: Any, updated: Collection[str]) -> list[StateTensor]:
    """The parameters of the optimizers that a program updates, in the model's order.

    The program knows better than `requires_grad` between calls, which a step may change within.
    """
    given = {
        id(p)
        for one in optimizers_of(optimizer)
        for group in one.param_groups
        for p in group["params"]
    }
    names = {*updated}
    return [s for s in state_of(model, None) if id(s.tensor) in given and s.name in names]


def _averaged(s: StateTensor) -> bool:
    return s.tensor.dtype in AVERAGED


def _tell(line: str) -> None:
    """Show a line of the first remaining rank; the launcher shows no other output of any but rank 0."""
    rank = dist.get_rank()
    hidden = RUN_DIR.read() and rank
    tell(f"{line} (--log-dir DIR keeps the output of rank {rank})" if hidden else line)
