"""Checkpoints: saved under one layout, resumed under any other, and checked before any change."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.argument_types import check_type
from tutti.calls.first_call import refuse_in_shards
from tutti.calls.running import Running
from tutti.capture.state.first_form import awaiting, make_places, make_slots
from tutti.capture.state.lift import StateTensor, state_of
from tutti.checkpoint.files import Reading, write_checkpoint
from tutti.checkpoint.folder import open_folder
from tutti.checkpoint.manifest import MANIFEST, Manifest, TensorForm
from tutti.checkpoint.owner_lock import OwnerLock
from tutti.checkpoint.share_plans import share_planner
from tutti.checkpoint.state_names import check_names
from tutti.checkpoint.unanimous import Unanimous, ranks_of
from tutti.comm.collectives.failure import without_frames
from tutti.comm.collectives.group import collective_timeout
from tutti.errors import CheckpointError, CommError
from tutti.launch.ranks import ensure_process_group
from tutti.launch.roles import is_first_worker
from tutti.remote_paths import is_of_one_process, is_remote
from tutti.saving import (
    equal_ranks,
    hyper_parameters,
    model_file,
    replica_checkpoint,
    saved_values,
    weight_files,
)
from tutti.saving.local_part import part_of
from tutti.saving.slot_places import make_slot_places
from tutti.saving.state_share import StateShare
from tutti.state.residence import is_here, local_of, set_local
from tutti.state.residences import adopt, known_residence, refuse_open, residence_of
from tutti.state.shards import plain_dtensor, unguarded

COUNT = "num_steps"
_FILES_OF_TORCH = (".pt", ".pth", ".bin")
_SLOTS = ("optim.", saved_values.PREFIX + "optim.")
# Another run may replace a checkpoint while this one reads it.
_MOST_TRIES = 3


def _state(running: Running, found: Mapping[str, Any] | None = None) -> list[StateTensor]:
    """The current state, with places for the tensors `found` in a checkpoint, by name."""
    refuse_open(running.job.model)
    if (
        any(n.startswith(_SLOTS) for n in found or ())
        and awaiting(running.job.optimizer) is not None
    ):
        refuse_in_shards(running.job.model, running.job.optimizer)
        make_places(running.job.optimizer)
    with unguarded():
        make_slots(running.job.optimizer)
        if found is not None:
            make_slot_places(running.job.model, running.job.optimizer, found)
    adopt(running.job.model, running.job.optimizer)
    return state_of(running.job.model, running.job.optimizer)


def state_dict(running: Running) -> dict[str, Any]:
    """Every state tensor of this rank, by name, without autograd; and the step count."""
    return _as_dict(running, _state(running))


def _as_dict(running: Running, every: list[StateTensor]) -> dict[str, Any]:
    state: dict[str, Any] = {n: plain_dtensor(x) for n, x in _kept(every).items()}
    state[COUNT] = torch.tensor(running.num_steps)
    return state | saved_values.to_save(running.python)


def _kept(state: list[StateTensor]) -> dict[str, Tensor]:
    """The tensors of `state` by name, without those of other pipeline ranks."""
    return {s.name: s.tensor for s in state if is_here(s.tensor)}


def load_state_dict(running: Running, state: Mapping[str, Any]) -> None:
    """Take over this rank's state, after a check of all names and shapes."""
    wrong: Any = {"fix": "what step.state_dict() has returned", "error": CheckpointError}
    check_type("state", state, Mapping, wanted="a mapping from names to tensors", **wrong)
    for name, x in state.items():
        if name != COUNT:
            check_type(f"state[{name!r}]", x, Tensor, wanted="a tensor", **wrong)
    every = _state(running, state)
    _refuse_unplaced(running, every, state)
    mine = _kept(every)
    python = {n: x for n, x in state.items() if n.startswith(saved_values.PREFIX)}
    found = {n: tuple(v.shape) for n, v in state.items() if n != COUNT and n not in python}
    elsewhere = {s.name: tuple(s.tensor.shape) for s in every if s.name not in mine}
    check_names(elsewhere | found, {s.name: s.tensor for s in every}, "the state given")
    saved_values.check(running.python, python, "the state given")
    for name, tensor in mine.items():
        set_local(tensor, part_of(state[name], tensor))
    saved_values.put(running.python, python)
    if COUNT in state:
        running.num_steps = int(state[COUNT])
    _restart(running)


def _refuse_unplaced(running: Running, every: list[StateTensor], state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for the tensors of one pipeline rank before the first call."""
    home = known_residence(running.job.model)
    lacks = [s.name for s in every if s.name not in state]
    if lacks and "pipe" in running.job.layout.mesh and (home is None or not home.owners):
        raise CheckpointError(
            f"the state given lacks {len(lacks)} tensors, such as {lacks[0]}",
            why="in a pipeline state_dict() holds the tensors of one rank, and the first call of a "
            "step assigns tensors to ranks",
            fix="call the step first; or step.save(path) and step.load(path), which need no call",
        )


def _restart(running: Running) -> None:
    """Reset the state of a replica strategy, which belongs to other weights."""
    if running.agreeing is not None:
        running.agreeing.restart()


def save(running: Running, path: Path, extra: Mapping[str, Any] | None) -> None:
    """Save all of the state; it becomes visible, whole, by one rename."""
    _refuse_file_of_torch(path)
    kinds, fix = (Mapping, NoneType), 'extra={"epoch": 3}, or none'
    check_type("extra", extra, kinds, wanted="a mapping", fix=fix, error=CheckpointError)

    def act(ranks: Unanimous) -> None:
        is_weights = _names_weights(path)
        kind = "" if is_weights else "the checkpoint "
        refuse_unequal(running, ranks, f"cannot write {kind}{path}")
        if is_weights:
            model_file.save(running, path, ranks)
        else:
            write_state(running, path, dict(extra or {}), ranks)
            running.divergence.note_equal(running.num_steps)

    by_ranks_left(running, act)


def refuse_unequal(running: Running, ranks: Unanimous, what: str) -> None:
    """Compare what ranks hold in common before a save; all ranks of it call together.

    Args:
        what: a description of the failure.

    Raises:
        CheckpointError: on every rank, two of them hold other values of a tensor.
    """
    if (
        running.begun and ranks.size > 1
    ):  # before the first call rank 0's values are those of the run
        home = residence_of(running.job.model, running.job.layout)
        equal_ranks.refuse_unequal(
            _state(running), home, ranks, what, running.divergence.fix_of_state
        )


def _refuse_file_of_torch(path: Path) -> None:
    """Raise `CheckpointError` for the name of a file of `torch.save`, unless it is a checkpoint already."""
    if path.suffix not in _FILES_OF_TORCH or (path / MANIFEST).exists():
        return
    whole = path.with_suffix("")
    raise CheckpointError(
        f"{path} has the name of a file of torch.save, but a checkpoint is a directory",
        why="each rank writes its part into a file of its own",
        fix=f'step.save("{whole}") for all of the state, step.save("{whole}.safetensors") for the model '
        f'alone, or torch.save(step.model_state(), "{path}")',
    )


def _names_weights(path: Path) -> bool:
    """Whether it is a file of weights, or their index. Raises `CheckpointError` for one behind a URL."""
    found = path.name.endswith((weight_files.SUFFIX, weight_files.INDEX_SUFFIX))
    if found and is_remote(path):
        raise CheckpointError(
            f"{path} is a remote file of weights",
            why="safetensors are mapped into memory, so they are local",
            fix="a local path, and a copy: fsspec.filesystem(...).put or .get",
        )
    return found


def by_ranks_left(running: Running, act: Callable[[Unanimous], None]) -> None:
    """Do `act`, a save, on all ranks together; if a replica is lost in it, the remaining ones begin again."""
    ensure_process_group()
    left = replica_checkpoint.agreed_left(running)
    while (error := _failed(running, left, act)) is not None:
        replica_checkpoint.drop_group(running, left)
        found = replica_checkpoint.left_since(running, left)
        if found is None:
            raise error
        left = found


def _failed(
    running: Running, left: Sequence[int], act: Callable[[Unanimous], None]
) -> CommError | None:
    """Do `act` with the ranks of these replicas; the error, if others may have lost a replica."""
    try:
        act(ranks_of(replica_checkpoint.group_of(running, left)))
    except CommError as error:
        if len(left) == 1:
            raise
        return without_frames(error)
    return None


def write_state(
    running: Running,
    path: Path,
    extra: dict[str, Any],
    ranks: Unanimous,
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the checkpoint directory `path`.

    Args:
        more: what this rank writes of other tensors, under names that no state has: the first rank plain
            ones, all ranks their shards. The manifest does not list them.
    """
    what = f"cannot write the checkpoint {path}"
    ranks.each(what, lambda: _json(extra))
    share = state_share(running, extra, more or {}, leads=ranks.leads)
    ranks.lead(what, lambda: _own(running, path))
    try:
        write_checkpoint(path, share_planner(share.tensors), share.manifest, ranks)
    finally:
        if not is_first_worker():  # an earlier one may be heard of again
            _LOCKS.pop(running, None)


def state_share(
    running: Running, extra: dict[str, Any], more: Mapping[str, Tensor], *, leads: bool
) -> StateShare:
    """This rank's share of a save of the current state.

    Args:
        extra: of the manifest.
        more: as in `write_state`.
        leads: whether this is the first rank of the save.
    """
    found = _state(running)
    state = _as_dict(running, found)
    every = {s.name: s.tensor for s in found} | {COUNT: state[COUNT]}
    every |= {n: x for n, x in state.items() if n.startswith(saved_values.PREFIX)}
    manifest = Manifest(
        layout=str(running.job.layout),
        replicas=replica_checkpoint.saved_as(running),
        tensors={n: TensorForm(tuple(v.shape), v.dtype) for n, v in every.items()},
        folder="",
        files={},
        extra=extra,
        groups=hyper_parameters.to_json(running.job.optimizer),
    )
    mine = replica_checkpoint.to_save(running, state | dict(more))
    if not running.begun and not leads:  # until the first call rank 0's values are those of the run
        mine = {n: x for n, x in mine.items() if isinstance(x, DTensor)}
    return StateShare(mine, manifest)


def _json(extra: dict[str, Any]) -> str:
    """Refuse values that JSON cannot hold, before any write."""
    try:
        json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "`extra` cannot be saved",
            why=str(error),
            fix="numbers, texts, lists, and dicts with texts as keys",
        ) from error
    return ""


# The locks of a step's latest folders; they end with it.
_LOCKS: WeakKeyDictionary[Any, dict[Path, OwnerLock]] = WeakKeyDictionary()
# A run with a new folder for each save does not reuse them.
_MOST_LOCKS = 8
# How long a save waits for the lock of a lost rank, which the launcher ends meanwhile: at most, and as a part
# of the time that the other ranks wait for this one.
_LOST_SECONDS, _LOST_PART = 15.0, 0.5


def open_for(running: Running, path: Path) -> OwnerLock:
    """Make and lock a folder for saves; a lost replica or worker gets time to release its lock.

    Raises:
        CheckpointError: another run saves there, or not all ranks can.
    """
    if is_of_one_process(path) and dist.is_initialized() and dist.get_world_size() > 1:
        raise CheckpointError(
            f"{path} is a folder of one process",
            why="the other ranks write their shares elsewhere",
            fix="a folder that all ranks see",
        )
    seconds = min(_LOST_SECONDS, _LOST_PART * collective_timeout().total_seconds())
    waits = replica_checkpoint.give_up_lost(running) or running.job.layout.server > 0
    return open_folder(path, seconds if waits else 0.0)


def _own(running: Running, path: Path) -> str:
    lock, locks = open_for(running, path), _LOCKS.setdefault(running, {})
    if is_remote(path):
        return ""
    locks.pop(path.resolve(), None)
    locks[path.resolve()] = lock
    while len(locks) > _MOST_LOCKS:
        del locks[next(iter(locks))]
    return ""


def load(running: Running, path: Path) -> dict[str, Any]:
    """Read a checkpoint into the step; raises for any problem before any change."""
    ensure_process_group()
    ranks = ranks_of()
    weights = weight_files.weights_at(path) if _names_weights(path) or not is_remote(path) else None
    if weights is not None:
        model_file.load(running, weights, ranks)
        _restart(running)
        return {}
    reading = Reading(path, ranks)
    for _ in range(_MOST_TRIES):
        try:
            return read_state(running, reading, ranks)
        except CheckpointError:
            if not reading.is_replaced():
                raise
            reading = Reading(path, ranks)
    return read_state(running, reading, ranks)


def check_fit(running: Running, reading: Reading, ranks: Unanimous) -> None:
    """Check names and shapes, without a change.

    Raises:
        CheckpointError: on every rank, the checkpoint is of another model or optimizer.
    """
    _check_fit(reading, ranks, _state(running, reading.manifest.tensors), running)


def _check_fit(
    reading: Reading, ranks: Unanimous, every: list[StateTensor], running: Running
) -> None:
    saved, path = reading.manifest.tensors, str(reading.path)
    python = _python(reading)

    def check() -> str:
        shapes = {n: form.shape for n, form in saved.items() if n != COUNT and n not in python}
        check_names(shapes, {s.name: s.tensor for s in every}, path)
        saved_values.check(running.python, python, path)
        return ""

    ranks.each(f"cannot read the checkpoint {path}", check)


def _python(reading: Reading) -> dict[str, TensorForm]:
    saved = reading.manifest.tensors
    return {n: form for n, form in saved.items() if n.startswith(saved_values.PREFIX)}


def read_state(running: Running, reading: Reading, ranks: Unanimous) -> dict[str, Any]:
    """Take over a checkpoint, after all checks; returns its `extra`."""
    every = _state(running, reading.manifest.tensors)
    mine, python = _kept(every), _python(reading)
    _check_fit(reading, ranks, every, running)
    fresh: dict[str, Any] = {n: torch.empty_like(plain_dtensor(t)) for n, t in mine.items()}
    fresh[COUNT] = torch.tensor(0)
    fresh |= {n: torch.empty(form.shape, dtype=form.dtype) for n, form in python.items()}
    reading.fill(fresh)
    remembered = replica_checkpoint.read(running, reading)
    for name, tensor in mine.items():
        set_local(tensor, local_of(fresh[name]))
    saved_values.put(running.python, {n: fresh[n] for n in python})
    running.num_steps = int(fresh[COUNT])
    replica_checkpoint.take_over(running, reading, remembered)
    hyper_parameters.take_over(running.job.optimizer, reading.manifest.groups)
    running.divergence.note_equal(running.num_steps)
    return reading.manifest.extra
