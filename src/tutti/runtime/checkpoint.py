"""Checkpoints: saved under one layout, resumed under any other, checked before anything is touched."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from tutti.capture.first_form import awaiting, make_places, make_slots
from tutti.capture.lift import StateTensor, state_of
from tutti.errors import CheckpointError
from tutti.layout import Layout
from tutti.runtime import replicas, saved_values
from tutti.runtime.first_call import refuse_in_shards
from tutti.runtime.python_values import PythonValues
from tutti.runtime.residence import adopt, is_here, local_of, refuse_open, residence_of, set_local
from tutti.runtime.shards import plain_dtensor, unguarded

FORMAT = 1
MANIFEST = "tutti.json"
COUNT = "num_steps"
_BEFORE = "use the checkpoint before it"
_SLOTS = ("optim.", saved_values.PREFIX + "optim.")


class Holder(Protocol):
    """What holds the state: a `tutti.Step`."""

    model: nn.Module
    optimizer: Any
    layout: Layout
    num_steps: int
    agreeing: replicas.Agreeing | None
    python: PythonValues


def _state(step: Holder, found: Iterable[str] = ()) -> list[StateTensor]:
    """The state of now, with places for what was `found` in a checkpoint."""
    refuse_open(step.model)
    if any(n.startswith(_SLOTS) for n in found) and awaiting(step.optimizer) is not None:
        refuse_in_shards(step.model, step.optimizer)
        make_places(step.optimizer)
    with unguarded():
        make_slots(step.optimizer)
    adopt(step.model, step.optimizer)
    return state_of(step.model, step.optimizer)


def state_dict(step: Holder) -> dict[str, Any]:
    """Every state tensor that this rank keeps, by name, without autograd; and the step count."""
    state: dict[str, Any] = {n: plain_dtensor(x) for n, x in _kept(_state(step)).items()}
    state[COUNT] = torch.tensor(step.num_steps)
    return state | saved_values.to_save(step.python)


def _kept(state: list[StateTensor]) -> dict[str, Tensor]:
    """The tensors of `state` by name, without those at other places of a pipeline."""
    return {s.name: s.tensor for s in state if is_here(s.tensor)}


def load_state_dict(step: Holder, state: Mapping[str, Any]) -> None:
    """Take over what this rank keeps; all names and shapes are checked first."""
    every = _state(step, state)
    mine = _kept(every)
    python = {n: x for n, x in state.items() if n.startswith(saved_values.PREFIX)}
    found = {n: tuple(v.shape) for n, v in state.items() if n != COUNT and n not in python}
    elsewhere = {s.name: tuple(s.tensor.shape) for s in every if s.name not in mine}
    _check_names(elsewhere | found, {s.name: s.tensor for s in every}, "the state given")
    saved_values.check(step.python, python, "the state given")
    for name, tensor in mine.items():
        set_local(tensor, _part_of(state[name], tensor))
    saved_values.put(step.python, python)
    if COUNT in state:
        step.num_steps = int(state[COUNT])
    _restart(step)


def _part_of(value: Tensor, like: Tensor) -> Tensor:
    """`value`, whole or sharded, as the local part that `like` has."""
    if isinstance(value, DTensor) and isinstance(like, DTensor):
        same = value.device_mesh == like.device_mesh and value.placements == like.placements
        return (value if same else _resharded(value.full_tensor(), like))._local_tensor.clone()
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    whole = whole.detach().to(dtype=like.dtype, device=like.device)
    if isinstance(like, DTensor):
        return _resharded(whole, like)._local_tensor.clone()
    return whole.clone()


def _resharded(whole: Tensor, like: DTensor) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _restart(step: Holder) -> None:
    """What a strategy of replicas remembers is about other weights."""
    if step.agreeing is not None:
        step.agreeing.restart(step)


def save(step: Holder, path: Path, extra: Mapping[str, Any] | None) -> None:
    """Write all of the state; the manifest comes last, so a directory with one is whole."""
    if path.suffix == ".safetensors":
        _save_model(step, path)
        return
    state = state_dict(step)
    every = {s.name: s.tensor for s in _state(step)} | {COUNT: state[COUNT]}
    every |= {n: x for n, x in state.items() if n.startswith(saved_values.PREFIX)}
    (path / MANIFEST).unlink(missing_ok=True)
    left = replicas.group_left(step)
    _together(left)
    with _alone_without_warning():
        whole = replicas.to_save(step, state)
        state_dict_saver.save(whole, checkpoint_id=str(path), process_group=left)
    if _rank(left) == 0:
        manifest = {
            "format": FORMAT,
            "layout": str(step.layout),
            "replicas": replicas.saved_as(step),
            "tensors": {n: [list(v.shape), _name(v.dtype)] for n, v in every.items()},
            "files": {f.name: f.stat().st_size for f in sorted(path.iterdir()) if f.is_file()},
            "extra": dict(extra or {}),
        }
        draft = path / (MANIFEST + ".draft")
        draft.write_text(json.dumps(manifest))
        draft.rename(path / MANIFEST)
    _together(left)


def load(step: Holder, path: Path) -> dict[str, Any]:
    """Read a checkpoint into the step; what is wrong with it is said before anything changes."""
    if path.suffix == ".safetensors":
        _load_model(step, path)
        return {}
    manifest = _manifest(path)
    every = _state(step, manifest["tensors"])
    saved = manifest["tensors"].items()
    python = {n: form for n, form in saved if n.startswith(saved_values.PREFIX)}
    shapes = {n: tuple(shape) for n, (shape, _) in saved if n != COUNT and n not in python}
    _check_names(shapes, {s.name: s.tensor for s in every}, str(path))
    saved_values.check(step.python, python, str(path))
    mine = _kept(every)
    fresh: dict[str, Any] = {n: torch.empty_like(plain_dtensor(t)) for n, t in mine.items()}
    fresh[COUNT] = torch.tensor(0)
    fresh |= {n: torch.empty(shape, dtype=getattr(torch, d)) for n, (shape, d) in python.items()}
    try:
        with _alone_without_warning():
            state_dict_loader.load(fresh, checkpoint_id=str(path))
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise CheckpointError(
            f"cannot read the checkpoint {path}", why=_reason(error), fix=_BEFORE
        ) from error
    for name, tensor in mine.items():
        set_local(tensor, local_of(fresh[name]))
    saved_values.put(step.python, {n: fresh[n] for n in python})
    step.num_steps = int(fresh[COUNT])
    if step.agreeing is not None:
        with _alone_without_warning():
            replicas.load(step, path, manifest.get("replicas", ""))
    return manifest["extra"]


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.exists():
        raise CheckpointError(
            f"{path} is not a whole checkpoint",
            why=f"it has no {MANIFEST}, which is written last"
            if path.exists()
            else "no such directory",
            fix=_BEFORE,
        )
    try:
        manifest = json.loads(file.read_text())
        version = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read", why=_reason(error), fix=_BEFORE) from error
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}; this version of tutti reads up to {FORMAT}",
            why="a newer tutti wrote it",
            fix="upgrade tutti",
        )
    for name, size in manifest["files"].items():
        there = (path / name).stat().st_size if (path / name).exists() else None
        if there != size:
            raise CheckpointError(
                f"{path} is damaged: {name} has {there if there is not None else 'no'} bytes of {size}",
                why="it was truncated or changed after it was written",
                fix=_BEFORE,
            )
    return manifest


def _check_names(
    found: Mapping[str, tuple[int, ...]], mine: Mapping[str, Tensor], where: str
) -> None:
    missing, extra = sorted(set(mine) - set(found)), sorted(set(found) - set(mine))
    wrong = [n for n in mine if n in found and tuple(mine[n].shape) != tuple(found[n])]
    if not (missing or extra or wrong):
        return
    why = []
    if missing:
        why.append(f"it lacks {len(missing)} tensors of this one, such as {missing[0]}")
    if extra:
        why.append(f"it has {len(extra)} that this one lacks, such as {extra[0]}")
    if wrong:
        n = wrong[0]
        why.append(f"{n} is {list(found[n])} there and {list(mine[n].shape)} here")
    raise CheckpointError(
        "the checkpoint is of another model or optimizer",
        at=where,
        why="; ".join(why),
        fix="build the same model and optimizer as when it was saved",
    )


def _save_model(step: Holder, path: Path) -> None:
    """Parameters and buffers, whole, by name; tied ones once."""
    refuse_open(step.model)
    whole = {}
    first = residence_of(step.model, step.layout).replica == 0
    for s in state_of(step.model, None) if first else ():  # of replicas, the first one's
        full = _at_rank_0(s.tensor.detach())
        if full is not None:
            whole[s.name] = full.cpu().contiguous().clone()
    if _rank() == 0:
        draft = path.with_suffix(".draft")
        save_file(whole, str(draft), metadata={"format": "pt"})
        draft.rename(path)
    _together()


def _at_rank_0(x: Tensor) -> Tensor | None:
    """All of a state tensor on rank 0, None elsewhere; it may have to come from another place."""
    if not isinstance(x, DTensor):
        return x if _rank() == 0 else None
    full = x.full_tensor() if is_here(x) else None
    source = int(x.device_mesh.mesh.flatten()[0])
    if source != 0 and _rank() == source:
        assert full is not None
        dist.send(full.contiguous(), 0)
    if source != 0 and _rank() == 0:
        full = torch.empty(x.shape, dtype=x.dtype, device=local_of(x).device)
        dist.recv(full, source)
    return full if _rank() == 0 else None


def _load_model(step: Holder, path: Path) -> None:
    """Parameters and buffers by name; a file may leave out buffers and tied names."""
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            shapes = {n: tuple(file.get_slice(n).get_shape()) for n in names}
            mine = {s.name: s for s in state_of(step.model, None)}
            needed = {n: s.tensor for n, s in mine.items() if s.kind == "parameter" or n in names}
            tied = {n for n, _ in step.model.named_parameters(remove_duplicate=False)}
            _check_names(
                {n: s for n, s in shapes.items() if n in mine or n not in tied}, needed, str(path)
            )
            for name, tensor in needed.items():
                if is_here(tensor):
                    set_local(tensor, _part_of(file.get_tensor(name), tensor))
        _restart(step)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"cannot read {path}", why=_reason(error), fix="a whole file in the safetensors format"
        ) from error


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """One device is an ordinary case here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _together(group: dist.ProcessGroup | None = None) -> None:
    if dist.is_initialized():
        dist.barrier(group)
