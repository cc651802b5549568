"""What replicas add to a checkpoint: the state of each, and what the strategy remembers.

The plain names hold the state of replica 0 (of the first that is left), so any layout can read it. The other
replicas' state, and what the strategy remembers on each, stand beside them under names that no module has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.calls.running import Running
from tutti.capture.state.lift import state_of
from tutti.checkpoint.files import Reading
from tutti.checkpoint.unanimous import ranks_of
from tutti.comm.collectives.group import collective_timeout
from tutti.environment import RUN_DIR
from tutti.launch.records import GivenUp, write_record
from tutti.replicas import replica_rows
from tutti.state.residence import local_of, set_local
from tutti.state.shards import plain_dtensor


def described(running: Running) -> str:
    """What must be the same for a run to go on as it would have."""
    if running.agreeing is None:
        return ""
    return f"replica={running.job.layout.num_replicas} sync={running.agreeing.strategy}"


def saved_as(running: Running) -> str:
    """The same of a checkpoint; "" before the first call, when strategies remember nothing yet."""
    if running.agreeing is None or running.agreeing.team is None:
        return ""
    lost = running.job.layout.num_replicas - len(replicas_left(running))
    return described(running) + (f" {lost} lost" if lost else "")


# So long a rank that has met a broken connection waits to be told that a replica is lost.
_LOSS_SECONDS, _LOOK_SECONDS = 10.0, 0.02


def group_of(running: Running, left: Sequence[int]) -> dist.ProcessGroup | None:
    """The group in which the ranks of these replicas save; None without replicas.

    It is for saves alone: where a rank is lost in one, `drop_group` wakes up the others.
    """
    agreeing = running.agreeing
    if agreeing is None or agreeing.team is None or not dist.is_initialized():
        return None
    if agreeing.saving is None or agreeing.saving[0] != tuple(left):
        mesh = running.job.layout.mesh
        ranks = [r for r in range(mesh.num_ranks) if mesh.coordinates(r)["replica"] in left]
        group = dist.new_group(ranks, timeout=collective_timeout(), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        agreeing.saving = tuple(left), group
    return agreeing.saving[1]


def drop_group(running: Running) -> None:
    """Destroy the group that is broken. Another one is of fewer ranks: its name must never come again."""
    if running.agreeing is not None and running.agreeing.saving is not None:
        dist.destroy_process_group(running.agreeing.saving[1])
        running.agreeing.saving = None


def lost_since(running: Running, left: Sequence[int]) -> bool:
    """Whether a replica of those `left` is lost; a broken connection may be seen before that is known."""
    until = time.monotonic() + _LOSS_SECONDS
    while running.job.layout.num_replicas > 1 and time.monotonic() < until:
        if len(replicas_left(running)) < len(left):
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def give_up_lost(running: Running) -> bool:
    """Let the launcher end stopped ranks of lost replicas; return whether a replica is lost.

    Such a rank may hold the lock of a folder, and nothing that it would do counts any more.
    """
    lost = set(range(running.job.layout.num_replicas)) - set(replicas_left(running))
    run_dir, mesh = RUN_DIR.read(), running.job.layout.mesh
    for rank in range(mesh.num_ranks) if run_dir and lost else ():
        if mesh.coordinates(rank)["replica"] in lost:
            write_record(Path(run_dir), GivenUp(rank))
    return bool(lost)


def first_left(running: Running) -> int:
    """The first replica that is not lost."""
    return replicas_left(running)[0]


def replicas_left(running: Running) -> list[int]:
    """The replicas that are not lost."""
    team = running.agreeing.team if running.agreeing is not None else None
    return team.between.here() if team is not None else list(range(running.job.layout.num_replicas))


def to_save(running: Running, state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` under the names of this rank's replica, and what its strategy remembers."""
    if running.job.layout.num_replicas == 1 or not dist.is_initialized():
        return dict(state)
    replica = replica_rows.replica_here(running.job.layout.mesh)
    first = replica == first_left(running)
    found = {n if first else _own(replica, n): x for n, x in state.items()}
    agreeing = running.agreeing
    if agreeing is not None and agreeing.team is not None:
        found |= _remembered(running, replica, agreeing.team.state())
    return found


def read(running: Running, reading: Reading, num_steps: int) -> dict[str, Tensor]:
    """This replica's own state in a checkpoint, and its strategy's, by the names there; changes nothing.

    Nothing where the checkpoint does not fit this run, or the state is not laid out yet.
    """
    agreeing = running.agreeing
    if agreeing is None or agreeing.team is None or not _fits(running, reading):
        return {}
    team, replica = agreeing.team, agreeing.replica
    template = team.expected(agreeing.weights(), agreeing.buffers(), num_steps)
    fresh = {n: torch.empty_like(x) for n, x in _remembered(running, replica, template).items()}
    if replica:
        state = {s.name: s.tensor for s in agreeing.here()}
        fresh |= {_own(replica, n): torch.empty_like(plain_dtensor(x)) for n, x in state.items()}
    reading.fill(fresh)
    return fresh


def take_over(running: Running, reading: Reading, found: Mapping[str, Tensor]) -> None:
    """Go on from what `read` has found, after the step has its number of steps.

    Where the checkpoint does not fit, replicas begin anew from replica 0's state. Before the first call
    nothing is laid out, and rank 0's state will be sent to all: the checkpoint is read again then.
    """
    agreeing = running.agreeing
    if agreeing is None:
        return
    same, team = _fits(running, reading), agreeing.team
    agreeing.unread = reading.path if same and team is None else None
    if team is None:
        return
    if not same:
        agreeing.restart()
        return
    replica = agreeing.replica
    if replica:
        for s in agreeing.here():
            set_local(s.tensor, local_of(found[_own(replica, s.name)]))
    prefix = _own(replica, "sync/")
    remembered = {n: x for n, x in found.items() if n.startswith(prefix)}
    team.load(
        {n.removeprefix(prefix): local_of(x) for n, x in remembered.items()}, running.num_steps
    )


def resume(running: Running) -> None:
    """Go on from the checkpoint that was loaded before the first call, once the state is laid out."""
    if running.agreeing is not None and running.agreeing.unread is not None:
        reading = Reading(running.agreeing.unread, ranks_of())
        take_over(running, reading, read(running, reading, running.num_steps))


def _fits(running: Running, reading: Reading) -> bool:
    return reading.manifest.replicas == described(running)


def _remembered(running: Running, replica: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A strategy's state by the name it is saved under; it lies as the weights do that it is about."""
    likes = {s.name: s.tensor for s in state_of(running.job.model, None)}
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
