"""A step whose replicas exchange weights: chooses the tensors, and the steps of the rounds.

Several steps may train one model. Each has a strategy and rounds of its own, for the weights that it trains
itself. Its local steps let replicas differ in state that another step has, too: that one does not compare it.
"""

from __future__ import annotations

import itertools
import weakref
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
from tutti.errors import CommError, LayoutError
from tutti.job import Job
from tutti.launch.records import ReplicaJoined, write_record
from tutti.launch.telling import tell
from tutti.replicas import replica_rows, strategies
from tutti.replicas.roster import Shapes
from tutti.replicas.strategy import AVERAGED, State
from tutti.replicas.team import Team
from tutti.state.local_changes import LocalChanges, Trainer, num_takeovers
from tutti.state.residence import local_of, run_device, set_local
from tutti.state.residences import residence_of
from tutti.user_lines import quoted, user_line

# All steps with replicas in this process, and a count of their loads before a first call.
_STEPS: weakref.WeakSet[Agreeing] = weakref.WeakSet()
_LOADS = itertools.count()


class Agreeing:
    """The exchanges of one step's replicas; does nothing before the step's first call.

    They exchange the parameters of the step's optimizers that its programs update. Such a parameter joins
    before the first call of such a program. A mean over all replicas includes floating buffers (running
    statistics); each replica keeps its own optimizer slots.

    `saving` has the groups of ranks that save together, by their replicas.
    `unread` is a checkpoint to resume from once the first call has laid out the state; `restored` is the
    state that has been read from it before that, and `num_loads` orders such loads of several steps.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.layout = job, job.layout
        self.strategy = strategies.parse(job.layout.sync)
        self.team: Team | None = None
        self.saving: dict[tuple[int, ...], Group] = {}
        self.unread: Path | None = None
        self.restored: set[str] = set()
        self.num_loads = 0
        self._mark = Trainer(job.step_name)
        self._marked: set[frozenset[str]] = set()
        self._num_takeovers = 0
        self._trained_last: Shapes = {}  # of the last call
        _STEPS.add(self)

    @property
    def replica(self) -> int:
        """This rank's replica; 0 before there are ranks."""
        return replica_rows.replica_here(self.layout.mesh)

    def rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """This replica's rows of the global batch."""
        return replica_rows.rows(tensors, self.replica, self.layout.num_replicas)

    def start(self, trained: Shapes) -> None:
        """Begin the strategy after the layout of the state for a program; all ranks call together.

        Raises:
            CommError: replicas differ in state that no step has changed.
            LayoutError: they differ in one of the `trained`, and the strategy keeps state of it.
        """
        team = Team(self.strategy, self.layout.mesh, run_device(self.job.model), _tell)
        changes, here = LocalChanges(self.job.model), self.here()
        changed = [s for s in here if changes.is_changed(s)]
        same = {s.name for s in here} - {s.name for s in changed}
        team.start({s.name: local_of(s.tensor) for s in here if s.name in same})
        compared = self.strategy.keeps_state and self.unread is None
        for s in [s for s in changed if compared and s.name in trained]:
            try:
                team.start({s.name: local_of(s.tensor)})
            except CommError as error:
                raise self._trained_twice(s, changes.trainer_of(s), error.why) from None
        self.team = team
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

    def trace(self, step: int, why: str) -> None:
        """Meet the other replicas before a trace after `step`, once the strategy has begun.

        Raises:
            CommError: some replicas do not trace, with the reason for the trace, and the first weight that is
                trained no longer, or not yet.
        """
        if self.team is None:
            return
        given = trained(self.job.model, self.job.optimizer, self._trained_last)
        frozen = [f'"{s.name}" is frozen' for s in given if not s.tensor.requires_grad]
        unfrozen = [
            f'"{s.name}" is trained'
            for s in state_of(self.job.model, None)
            if s.kind == "parameter" and s.tensor.requires_grad and s.name not in self._trained_last
        ]
        self.team.between.traces.begin(step, "; ".join([*(frozen or unfrozen)[:1], why]))

    def before(self, step: int, trained: Shapes, updated: frozenset[str]) -> None:
        """Let the parameters join that `step` trains first.

        Args:
            trained: all that it trains.
            updated: all state that it changes.

        Raises:
            LayoutError: another step has trained one of them since the last call, and the strategy keeps
                state of it.
        """
        assert self.team is not None
        known = self._num_takeovers == num_takeovers() and updated in self._marked
        if not known:
            self._note_changes(trained, updated)
        self._trained_last = trained
        self.team.before(step, trained, self.weights)

    def _note_changes(self, trained: Shapes, updated: frozenset[str]) -> None:
        assert self.team is not None
        changes = LocalChanges(self.job.model)
        state = [s for s in state_of(self.job.model, None) if s.name in updated]
        ours = [s for s in state if s.name in trained]
        for s in ours if not self.strategy.shares else ():
            by = changes.trainer_of(s)
            if by not in (None, self._mark) and s.name in self.team.roster:
                raise self._trained_twice(s, by)
        changes.mark_changed(state)
        changes.mark_trained(ours, self._mark)
        self._marked.add(updated)
        self._num_takeovers = num_takeovers()

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
        """Reset the state of the strategies, also of other steps on this model, after a replacement of the
        weights."""
        self.unread = None
        for one in (self, *self.others()):
            if one.team is not None:
                one.team.restart()

    def restored_now(self, state: Collection[StateTensor]) -> None:
        """Note state that this replica has from a checkpoint: others may have other values."""
        self.restored |= {s.name for s in state}
        LocalChanges(self.job.model).mark_changed(state)

    def load(self, strategy: State, num_steps: int) -> None:
        """Continue from the state of the strategy in a checkpoint after this number of steps."""
        assert self.team is not None
        self.team.load(strategy, num_steps, self.weights())
        weights = [s for s in state_of(self.job.model, None) if s.name in self.team.roster]
        LocalChanges(self.job.model).mark_trained(weights, self._mark)

    def read_later(self, path: Path | None) -> None:
        """Note a checkpoint to resume from at the first call."""
        self.unread, self.num_loads = path, next(_LOADS)
        self.restored.clear()

    def others(self) -> list[Agreeing]:
        """The other steps that have some of this one's state, in the order of their last loads."""
        own = {id(s.tensor) for s in state_of(self.job.model, None)}
        found = [
            one
            for one in _STEPS
            if one is not self and any(id(s.tensor) in own for s in state_of(one.job.model, None))
        ]
        return sorted(found, key=lambda one: one.num_loads)

    def laid_out(self) -> list[StateTensor]:
        """This rank's state that has its place: before the first call that of other steps' calls."""
        if self.team is not None:
            return self.here()
        started = [one for one in self.others() if one.team is not None]
        here = {id(s.tensor) for one in started for s in one.here()}
        # before the first call an optimizer knows the parameters in their places if another step has it, too
        theirs = {id(o) for one in started for o in optimizers_of(one.job.optimizer)}
        own = [o for o in optimizers_of(self.job.optimizer) if id(o) in theirs]
        return [s for s in state_of(self.job.model, own) if id(s.tensor) in here]

    def _trained_twice(self, s: StateTensor, by: Trainer | None, apart: str = "") -> LayoutError:
        """The error for a weight that another step has changed; `apart`: its hashes where replicas differ."""
        whose = (
            f"{by.name} and {self._mark.name}"
            if by
            else "a checkpoint of another step, and this one"
        )
        why = "replicas keep a value of each weight between rounds, and each step has rounds of its own: "
        if apart:
            why += f"they begin with the value before the step trains it, which differs\n       {apart}"
        else:
            why += "those of one would count the changes by the other once more"
        return LayoutError(
            f'two steps train "{s.name}" under sync={self.strategy}: {whose}',
            at=quoted(user_line()),
            why=why,
            fix="sync=average(every=...) with traffic=fp32, which keeps no such value; or one step for both; "
            "or weights of its own for each step",
        )

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
    """The parameters of the optimizers, or of a step without one, that a program updates, in the model's
    order.

    The program knows better than `requires_grad` between calls, which a step may change within.
    """
    given = {
        id(p)
        for one in optimizers_of(optimizer)
        for group in one.param_groups
        for p in group["params"]
    }
    names = {*updated}
    found = [s for s in state_of(model, None) if s.kind == "parameter" and s.name in names]
    return [s for s in found if id(s.tensor) in given] if optimizers_of(optimizer) else found


def _averaged(s: StateTensor) -> bool:
    return s.tensor.dtype in AVERAGED


def _tell(line: str) -> None:
    """Show a line of the first remaining rank; the launcher shows no other output of any but rank 0."""
    rank = dist.get_rank()
    hidden = RUN_DIR.read() and rank
    tell(f"{line} (--log-dir DIR keeps the output of rank {rank})" if hidden else line)
