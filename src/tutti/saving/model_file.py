"""The model alone in one `.safetensors` file: whole tensors by name, with a checksum over them all."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti.calls.running import Running
from tutti.capture.state.lift import state_of
from tutti.checkpoint.manifest import USE_EARLIER
from tutti.checkpoint.state_names import check_names
from tutti.checkpoint.unanimous import Unanimous
from tutti.comm.collectives.payload import octets
from tutti.durable import sync_folder
from tutti.errors import CheckpointError
from tutti.saving.local_part import part_of
from tutti.saving.replica_checkpoint import first_left
from tutti.state.residence import is_here, local_of, refuse_open, residence_of, set_local

_CHECKSUM = "tutti.sha256"


def save(running: Running, path: Path, ranks: Unanimous) -> None:
    """Parameters and buffers, whole, by name; tied ones once. The file appears by one rename.

    Raises:
        CheckpointError: on every rank, the write fails; an existing file stays unchanged.
    """
    model = running.job.model
    refuse_open(model)
    whole: dict[str, Tensor] = {}
    first = residence_of(model, running.job.layout).replica == first_left(running)
    for s in state_of(model, None) if first else ():
        full = _at_first_rank(s.tensor.detach(), ranks)
        if full is not None:
            whole[s.name] = full.cpu().contiguous().clone()
    ranks.lead(f"cannot write {path}", lambda: _write(whole, path))


def _write(whole: dict[str, Tensor], path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_drafts(path)
    draft = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.draft")
    try:
        try:
            save_file(
                whole,
                str(draft),
                metadata={
                    "format": "pt",
                    _CHECKSUM: _checksum((n, whole[n]) for n in sorted(whole)),
                },
            )
        except SafetensorError as error:  # it wraps the system's error
            raise OSError(0, str(error), str(path)) from error
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)
    return ""


def _remove_drafts(path: Path) -> None:
    """Remove the drafts of processes of this host that were killed during a write."""
    for draft in path.parent.glob(f".{path.name}.{socket.gethostname()}-*.draft"):
        pid = draft.name.removesuffix(".draft").rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            draft.unlink(missing_ok=True)


def _at_first_rank(x: Tensor, ranks: Unanimous) -> Tensor | None:
    """All of a state tensor on the first rank, None elsewhere; another stage may keep it."""
    first = ranks.first_rank
    if not isinstance(x, DTensor):
        return x if ranks.leads else None
    full = x.full_tensor() if is_here(x) else None
    source = int(x.device_mesh.mesh.flatten()[0])
    if source != first and not ranks.leads and dist.get_rank() == source:
        assert full is not None
        dist.send(full.contiguous(), first)
    if source != first and ranks.leads:
        full = torch.empty(x.shape, dtype=x.dtype, device=local_of(x).device)
        dist.recv(full, source)
    return full if ranks.leads else None


def load(model: nn.Module, path: Path, ranks: Unanimous) -> None:
    """Parameters and buffers by name; a file may leave out buffers and tied names.

    Raises:
        CheckpointError: on every rank, the file cannot be read, is damaged, or is of another model.
    """
    mine = {s.name: s.tensor for s in state_of(model, None)}
    what = f"cannot read {path}"
    ranks.lead(what, lambda: _verify(path))
    parts: dict[str, Tensor] = {}
    ranks.each(what, lambda: _read(model, path, mine, parts))
    for name, part in parts.items():
        set_local(mine[name], part)


def _verify(path: Path) -> str:
    """Compare the checksum, if the file has one: other programs write none."""
    with _opened(path) as file:
        said = (file.metadata() or {}).get(_CHECKSUM)
        if said is not None and said != _checksum(
            (n, file.get_tensor(n)) for n in sorted(file.keys())
        ):
            raise CheckpointError(
                f"{path} is damaged: its tensors have another checksum",
                why="a bit changed after the file was written",
                fix=USE_EARLIER,
            )
    return ""


def _read(model: nn.Module, path: Path, mine: dict[str, Tensor], parts: dict[str, Tensor]) -> str:
    kinds = {s.name: s.kind for s in state_of(model, None)}
    with _opened(path) as file:
        names = set(file.keys())
        shapes = {n: tuple(file.get_slice(n).get_shape()) for n in names}
        needed = {n: x for n, x in mine.items() if kinds[n] == "parameter" or n in names}
        tied = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        found = {n: s for n, s in shapes.items() if n in mine or n not in tied}
        check_names(found, needed, str(path))
        for name, tensor in needed.items():
            if is_here(tensor):
                parts[name] = part_of(file.get_tensor(name), tensor)
    return ""


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        fix = "a whole file in the safetensors format"
        raise CheckpointError(f"cannot read {path}", why=str(error), fix=fix) from error


def _checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The checksum of names, dtypes, shapes and bytes, in the given order, which is by name."""
    found = hashlib.sha256()
    for name, x in tensors:
        found.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        found.update(octets(x))
    return found.hexdigest()
