"""The replicas' part of a checkpoint: the state of each, and of its strategy.

The plain names hold the state of replica 0 (or of the first remaining one), so any layout can read it. The
other replicas' state, and the strategy's state of each, have names that no module has.
"""

from __future__ import annotations

import gc
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
from tutti.comm.collectives.fresh_group import fresh_group
from tutti.comm.collectives.group import Group
from tutti.environment import RUN_DIR
from tutti.errors import CheckpointError
from tutti.launch.records import GivenUp, write_record
from tutti.replicas import replica_rows
from tutti.replicas.team import ROSTER, weight_of
from tutti.state.agreeing import Agreeing
from tutti.state.residence import local_of, run_device, set_local
from tutti.state.shards import plain_dtensor


def described(running: Running) -> str:
    """The settings that must be equal for an exact resume."""
    if running.agreeing is None:
        return ""
    return f"replica={running.job.layout.num_replicas} sync={running.agreeing.strategy}"


def saved_as(running: Running) -> str:
    """The same for a checkpoint; "" before the first call, when strategies have no state yet."""
    if running.agreeing is None or running.agreeing.team is None:
        return ""
    lost = running.job.layout.num_replicas - len(replicas_left(running))
    return described(running) + (f" {lost} lost" if lost else "")


# How long ranks wait after a broken connection for the report of a lost replica.
_LOSS_SECONDS, _LOOK_SECONDS = 10.0, 0.02


def group_of(running: Running, left: Sequence[int]) -> Group | None:
    """The group of these replicas' ranks for a save; None without replicas.

    It is for saves alone. A group with other replicas is dropped, which wakes ranks that still wait in it.

    Raises:
        CommError: the ranks cannot make a group within `TUTTI_TIMEOUT`. A replica alone has one
            from its start.
    """
    agreeing = running.agreeing
    if agreeing is None or agreeing.team is None or not dist.is_initialized():
        return None
    for replicas in [found for found in agreeing.saving if not {*found} <= {*left}]:
        drop_group(running, replicas)
    if tuple(left) not in agreeing.saving:
        agreeing.saving[tuple(left)] = fresh_group(agreeing.ranks_of(left))
    return agreeing.saving[tuple(left)]


def drop_group(running: Running, left: Sequence[int]) -> None:
    """Destroy the broken group of these replicas' ranks, which wakes those that still wait in it.

    Its connections close with the last reference to it; an error may keep one in a circle with its frames.
    """
    group = running.agreeing.saving.pop(tuple(left), None) if running.agreeing is not None else None
    if group is not None and group.handle is not None:
        dist.destroy_process_group(group.handle)
        del group
        gc.collect()


def agreed_left(running: Running) -> list[int]:
    """The remaining replicas, for a save of all of their ranks: the same on all ranks of this replica.

    They call this together: each sees only the loss of its own counterparts.

    Raises:
        CommError: this replica has lost a rank, or the others have given this replica up.
    """
    return _agreed(running, late=False)[0]


def left_since(running: Running, left: Sequence[int]) -> list[int] | None:
    """Those of `left` that remain after a broken connection; None if no replica is lost.

    All ranks of this replica call this together. A connection may break before the loss is known: they wait.

    Raises:
        CommError: as `agreed_left`.
    """
    until = time.monotonic() + _LOSS_SECONDS
    while len(left) > 1:
        found, late = _agreed(running, late=time.monotonic() > until)
        if len(found) < len(left):
            return found
        if late:
            break
        time.sleep(_LOOK_SECONDS)
    return None


def _agreed(running: Running, *, late: bool) -> tuple[list[int], bool]:
    """The remaining replicas, and whether a rank of this one is `late`."""
    agreeing = running.agreeing
    if agreeing is None or agreeing.team is None:
        return replicas_left(running), True
    return agreeing.team.between.agreed(late=late)


def give_up_lost(running: Running) -> bool:
    """Let the launcher end stopped ranks of lost replicas; return whether a replica is lost.

    Such a rank may hold the lock of a folder, and its results no longer count.
    """
    lost = set(range(running.job.layout.num_replicas)) - set(replicas_left(running))
    run_dir, mesh = RUN_DIR.read(), running.job.layout.mesh
    for rank in range(mesh.num_ranks) if run_dir and lost else ():
        if mesh.coordinates(rank)["replica"] in lost:
            write_record(Path(run_dir), GivenUp(rank))
    return bool(lost)


def first_left(running: Running) -> int:
    """The first remaining replica."""
    return replicas_left(running)[0]


def replicas_left(running: Running) -> list[int]:
    """The remaining replicas."""
    team = running.agreeing.team if running.agreeing is not None else None
    return team.between.here() if team is not None else list(range(running.job.layout.num_replicas))


def to_save(running: Running, state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` under the names of this rank's replica, and the state of its strategy."""
    if running.job.layout.num_replicas == 1 or not dist.is_initialized():
        return dict(state)
    replica = replica_rows.replica_here(running.job.layout.mesh)
    first = replica == first_left(running)
    found = {n if first else _own(replica, n): x for n, x in state.items()}
    agreeing = running.agreeing
    if agreeing is not None and agreeing.team is not None:
        found |= _remembered(running, replica, agreeing.team.state())
    return found


def read(running: Running, reading: Reading) -> dict[str, Tensor]:
    """This replica's own state in a checkpoint, and its strategy's, by the names there; changes nothing.

    Empty if the checkpoint does not fit this run. State that is not laid out yet is not read.
    """
    agreeing = running.agreeing
    if agreeing is None or not dist.is_initialized() or not _fits(running, reading):
        return {}
    return _read(agreeing, reading)


def _read(agreeing: Agreeing, reading: Reading) -> dict[str, Tensor]:
    fresh = _of_strategy(agreeing, reading) if agreeing.team is not None else {}
    if agreeing.replica:
        done = agreeing.restored if agreeing.unread == reading.path else set[str]()
        names = {*reading.manifest.tensors} - done
        state = {s.name: s.tensor for s in agreeing.laid_out() if s.name in names}
        own = {n: torch.empty_like(plain_dtensor(x)) for n, x in state.items()}
        fresh |= {_own(agreeing.replica, n): x for n, x in own.items()}
    reading.fill(fresh)
    return fresh


def _of_strategy(agreeing: Agreeing, reading: Reading) -> dict[str, Tensor]:
    """Room for the state of this rank's strategy in a checkpoint, for weights here; the weights that replicas
    exchange may be others now than at the save."""
    here = {s.name: s.tensor for s in agreeing.here() if s.kind != "slot"}
    prefix, device = _own(agreeing.replica, "sync/"), run_device(agreeing.job.model)
    found: dict[str, Tensor] = {}
    forms = reading.forms(prefix)
    if prefix + ROSTER not in forms:
        raise CheckpointError(
            f"{reading.path} does not say which weights its replicas exchange",
            why="an earlier version of tutti has saved it",
            fix="load it under a layout without replicas, save it, and load that",
        )
    for name, form in forms.items():
        key = name.removeprefix(prefix)
        like = here.get(weight_of(key))
        if isinstance(like, DTensor) and tuple(like.shape) == form.shape:
            found[name] = torch.empty_like(plain_dtensor(like), dtype=form.dtype)
        elif like is not None or key == ROSTER:
            found[name] = torch.empty(form.shape, dtype=form.dtype, device=device)
    return found


def take_over(running: Running, reading: Reading, found: Mapping[str, Tensor]) -> None:
    """Continue from the result of `read`, after the step has its number of steps.

    If the checkpoint does not fit, replicas begin anew from replica 0's state. Before the first call rank 0's
    state will go to all, without what other steps on this model have laid out: `resume` then reads the rest.
    """
    agreeing = running.agreeing
    if agreeing is None:
        return
    if not _fits(running, reading):
        agreeing.restart()
        return
    agreeing.read_later(reading.path if agreeing.team is None else None)
    _restore(agreeing, found)
    if agreeing.team is None:
        return
    prefix = _own(agreeing.replica, "sync/")
    remembered = {n: x for n, x in found.items() if n.startswith(prefix)}
    state = {n.removeprefix(prefix): local_of(x) for n, x in remembered.items()}
    agreeing.load(state, running.num_steps)


def _restore(agreeing: Agreeing, found: Mapping[str, Tensor]) -> None:
    """Set this replica's own state as far as it is laid out; in it replicas may differ from now on."""
    every = agreeing.laid_out()
    agreeing.restored_now(every)
    for s in every if agreeing.replica else ():
        if (own := found.get(_own(agreeing.replica, s.name))) is not None:
            set_local(s.tensor, local_of(own))


def resume(running: Running) -> None:
    """Continue from a checkpoint loaded before the first call, once the state is laid out.

    Other steps that wait for their first call may have loaded some of this state, too: the last load counts.
    """
    agreeing = running.agreeing
    if agreeing is None:
        return
    waiting = [one for one in agreeing.others() if one.team is None]
    for one in sorted([agreeing, *waiting], key=lambda one: one.num_loads):
        if one.unread is None:
            continue
        reading = Reading(one.unread, ranks_of())
        found = _read(one, reading)
        if one is agreeing:
            take_over(running, reading, found)
        else:
            _restore(one, found)


def _fits(running: Running, reading: Reading) -> bool:
    return reading.manifest.replicas == described(running)


def _remembered(running: Running, replica: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A strategy's state by its name in the checkpoint, with the sharding of its weights."""
    likes = {s.name: s.tensor for s in state_of(running.job.model, None)}
    found: dict[str, Tensor] = {}
    for key, x in state.items():
        like = likes.get(weight_of(key))
        if isinstance(like, DTensor) and x.shape == local_of(like).shape:
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
