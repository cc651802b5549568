"""A step whose replicas agree now and then: which tensors take part, and when."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti.capture.state.lift import StateTensor, optimizers_of, state_of
from tutti.checkpoint.files import Reading
from tutti.checkpoint.unanimous import ranks_of
from tutti.comm.collectives.group import collective_timeout
from tutti.environment import RUN_DIR
from tutti.launch.records import GivenUp, Joined, write_record
from tutti.layout import Layout
from tutti.replicas import replica_rows, strategies
from tutti.replicas.strategy import AVERAGED
from tutti.replicas.team import Team
from tutti.state.residence import local_of, residence_of, run_device, set_local
from tutti.state.shards import plain_dtensor


class Holder(Protocol):
    """What holds the state: a `tutti.Step`."""

    model: nn.Module
    optimizer: Any
    layout: Layout
    num_steps: int
    agreeing: Agreeing | None


class Agreeing:
    """How the replicas of one step agree; does nothing before the step's first call.

    They agree on the parameters that the step's optimizers train. Floating buffers (running statistics) are
    averaged where all replicas take a mean; the optimizers' slots stay each replica's own.

    `unread` is a checkpoint to go on from once the first call has laid out the state.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.strategy = strategies.parse(layout.sync)
        self.team: Team | None = None
        self.saving: tuple[tuple[int, ...], dist.ProcessGroup] | None = None
        self.unread: Path | None = None

    @property
    def replica(self) -> int:
        """Which replica this rank belongs to; 0 before there are ranks."""
        return replica_rows.replica_here(self.layout.mesh)

    def rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """This replica's rows of the global batch."""
        return replica_rows.rows(tensors, self.replica, self.layout.num_replicas)

    def batch(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same for the tensors in a batch."""
        return replica_rows.of_batch(batch, self.replica, self.layout.num_replicas)

    def start(self, step: Holder) -> None:
        """All ranks together, once the state is laid out."""
        names = [s.name for s in _trained(step)]
        self.team = Team(self.strategy, self.layout.mesh, names, run_device(step.model))
        everything = {s.name: local_of(s.tensor) for s in _here(step)}
        self.team.start(self.weights(step), everything)
        group = dist.new_group(timeout=collective_timeout())
        assert isinstance(group, dist.ProcessGroup)
        self.saving = tuple(range(self.layout.num_replicas)), group
        if run_dir := RUN_DIR.read():
            write_record(Path(run_dir), Joined(dist.get_rank(), self.replica))
        if self.unread is not None:
            reading = Reading(self.unread, ranks_of())
            take_over(step, reading, read(step, reading, step.num_steps))

    def after(self, step: Holder) -> None:
        """What is due after the steps taken so far."""
        assert self.team is not None
        if not self.team.is_due(step.num_steps):
            return
        weights, buffers = self.weights(step), self.buffers(step)
        with torch.no_grad():
            changed = self.team.after(step.num_steps, weights, buffers)
        tensors = {s.name: s.tensor for s in state_of(step.model, None)}
        for name, value in changed.items():
            if value is not weights.get(name):
                set_local(tensors[name], value)

    def restart(self, step: Holder) -> None:
        """Forget what the strategy remembers: the weights have been replaced."""
        self.unread = None
        if self.team is not None:
            self.team.restart(self.weights(step))

    def weights(self, step: Holder) -> dict[str, Tensor]:
        """This rank's part of what replicas agree on."""
        here = {s.name for s in _here(step)}
        return {s.name: local_of(s.tensor) for s in _trained(step) if s.name in here}

    def buffers(self, step: Holder) -> dict[str, Tensor]:
        """This rank's part of the running statistics."""
        kept = [s for s in _here(step) if s.kind == "buffer" and _averaged(s)]
        return {s.name: local_of(s.tensor) for s in kept}


# Checkpoints: the plain names hold the state of replica 0 (of the first that is left), so any layout can read
# it. The other replicas' state, and what the strategy remembers on each, stand beside them under names that
# no module has.


def described(step: Holder) -> str:
    """What must be the same for a run to go on as it would have."""
    if step.agreeing is None:
        return ""
    return f"replica={step.layout.num_replicas} sync={step.agreeing.strategy}"


def saved_as(step: Holder) -> str:
    """The same of a checkpoint; "" before the first call, when strategies remember nothing yet."""
    if step.agreeing is None or step.agreeing.team is None:
        return ""
    lost = step.layout.num_replicas - len(replicas_left(step))
    return described(step) + (f" {lost} lost" if lost else "")


# So long a rank that has met a broken connection waits to be told that a replica is lost.
_LOSS_SECONDS, _LOOK_SECONDS = 10.0, 0.02


def group_of(step: Holder, left: Sequence[int]) -> dist.ProcessGroup | None:
    """The group in which the ranks of these replicas save; None without replicas.

    It is for saves alone: where a rank is lost in one, `drop_group` wakes up the others.
    """
    agreeing = step.agreeing
    if agreeing is None or agreeing.team is None or not dist.is_initialized():
        return None
    if agreeing.saving is None or agreeing.saving[0] != tuple(left):
        mesh = step.layout.mesh
        ranks = [r for r in range(mesh.num_ranks) if mesh.coordinates(r)["replica"] in left]
        group = dist.new_group(ranks, timeout=collective_timeout(), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        agreeing.saving = tuple(left), group
    return agreeing.saving[1]


def drop_group(step: Holder) -> None:
    """Destroy the group that is broken. Another one is of fewer ranks: its name must never come again."""
    if step.agreeing is not None and step.agreeing.saving is not None:
        dist.destroy_process_group(step.agreeing.saving[1])
        step.agreeing.saving = None


def lost_since(step: Holder, left: Sequence[int]) -> bool:
    """Whether a replica of those `left` is lost; a broken connection may be seen before that is known."""
    until = time.monotonic() + _LOSS_SECONDS
    while step.layout.num_replicas > 1 and time.monotonic() < until:
        if len(replicas_left(step)) < len(left):
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def give_up_lost(step: Holder) -> bool:
    """Let the launcher end stopped ranks of lost replicas; return whether a replica is lost.

    Such a rank may hold the lock of a folder, and nothing that it would do counts any more.
    """
    lost = set(range(step.layout.num_replicas)) - set(replicas_left(step))
    run_dir, mesh = RUN_DIR.read(), step.layout.mesh
    for rank in range(mesh.num_ranks) if run_dir and lost else ():
        if mesh.coordinates(rank)["replica"] in lost:
            write_record(Path(run_dir), GivenUp(rank))
    return bool(lost)


def first_left(step: Holder) -> int:
    """The first replica that is not lost."""
    return replicas_left(step)[0]


def replicas_left(step: Holder) -> list[int]:
    """The replicas that are not lost."""
    team = step.agreeing.team if step.agreeing is not None else None
    return team.between.here() if team is not None else list(range(step.layout.num_replicas))


def to_save(step: Holder, state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` under the names of this rank's replica, and what its strategy remembers."""
    if step.layout.num_replicas == 1 or not dist.is_initialized():
        return dict(state)
    replica = replica_rows.replica_here(step.layout.mesh)
    first = replica == first_left(step)
    found = {n if first else _own(replica, n): x for n, x in state.items()}
    agreeing = step.agreeing
    if agreeing is not None and agreeing.team is not None:
        found |= _remembered(step, replica, agreeing.team.state())
    return found


def read(step: Holder, reading: Reading, num_steps: int) -> dict[str, Tensor]:
    """This replica's own state in a checkpoint, and its strategy's, by the names there; changes nothing.

    Nothing where the checkpoint does not fit this run, or the state is not laid out yet.
    """
    agreeing = step.agreeing
    if agreeing is None or agreeing.team is None or not _fits(step, reading):
        return {}
    team, replica = agreeing.team, agreeing.replica
    template = team.expected(agreeing.weights(step), agreeing.buffers(step), num_steps)
    fresh = {n: torch.empty_like(x) for n, x in _remembered(step, replica, template).items()}
    if replica:
        state = {s.name: s.tensor for s in _here(step)}
        fresh |= {_own(replica, n): torch.empty_like(plain_dtensor(x)) for n, x in state.items()}
    reading.fill(fresh)
    return fresh


def take_over(step: Holder, reading: Reading, found: Mapping[str, Tensor]) -> None:
    """Go on from what `read` has found, after the step has its number of steps.

    Where the checkpoint does not fit, replicas begin anew from replica 0's state. Before the first call
    nothing is laid out, and rank 0's state will be sent to all: the checkpoint is read again then.
    """
    agreeing = step.agreeing
    if agreeing is None:
        return
    same, team = _fits(step, reading), agreeing.team
    agreeing.unread = reading.path if same and team is None else None
    if team is None:
        return
    if not same:
        agreeing.restart(step)
        return
    replica = agreeing.replica
    if replica:
        for s in _here(step):
            set_local(s.tensor, local_of(found[_own(replica, s.name)]))
    prefix = _own(replica, "sync/")
    remembered = {n: x for n, x in found.items() if n.startswith(prefix)}
    team.load({n.removeprefix(prefix): local_of(x) for n, x in remembered.items()}, step.num_steps)


def _fits(step: Holder, reading: Reading) -> bool:
    return reading.manifest.replicas == described(step)


def _remembered(step: Holder, replica: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A strategy's state by the name it is saved under; it lies as the weights do that it is about."""
    likes = {s.name: s.tensor for s in state_of(step.model, None)}
    found: dict[str, Tensor] = {}
    for key, x in state.items():
        like = likes.get(key.partition(".")[2])
        if isinstance(like, DTensor):
            x = DTensor.from_local(
                x,
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
        found[_own(replica, f"sync/{key}")] = x
    return found


def _own(replica: int, name: str) -> str:
    return f"replica/{replica}/{name}"


def trained(model: nn.Module, optimizer: Any) -> list[StateTensor]:
    """The parameters that the optimizers change, in the model's order; not all dtypes can be averaged."""
    given = {
        id(p)
        for one in optimizers_of(optimizer)
        for group in one.param_groups
        for p in group["params"]
        if p.requires_grad
    }
    return [s for s in state_of(model, None) if id(s.tensor) in given]


def _trained(step: Holder) -> list[StateTensor]:
    return trained(step.model, step.optimizer)


def _here(step: Holder) -> list[StateTensor]:
    """The state that this rank keeps: of a pipeline, that of its place."""
    home = residence_of(step.model, step.layout)
    place = step.layout.mesh.coordinates(dist.get_rank()).get("pipe", 0)
    return [s for s in state_of(step.model, step.optimizer) if home.keeper(s.name, place) == place]


def _averaged(s: StateTensor) -> bool:
    return s.tensor.dtype in AVERAGED
