"""The model alone in `.safetensors` files, whole: saved, and loaded by slices under any layout."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti.calls.running import Running
from tutti.capture.state.lift import StateTensor, state_of
from tutti.checkpoint.state_names import check_names
from tutti.checkpoint.unanimous import Unanimous
from tutti.durable import sync_folder
from tutti.saving.local_part import part_of
from tutti.saving.replica_checkpoint import first_left
from tutti.saving.weight_files import (
    CHECKSUM,
    INDEX_SUFFIX,
    SUFFIX,
    StoredTensor,
    checksum,
    files_of,
    stored_in,
    verify,
)
from tutti.state.deferred import STORED
from tutti.state.residence import Residence, is_here, local_of, set_local
from tutti.state.residences import refuse_open, residence_of

# The most bytes of tensors in one of several files, as Hugging Face divides them.
FILE_NBYTES = 5 * 10**9


def save(running: Running, path: Path, ranks: Unanimous) -> None:
    """Parameters and buffers, whole, by name; tied ones once. They appear by one rename.

    A path that ends in `.safetensors.index.json` has files of at most `FILE_NBYTES`, and rank 0 needs memory
    for one of them.

    Raises:
        CheckpointError: on every rank, the write fails; existing files stay unchanged.
    """
    model = running.job.model
    refuse_open(model)
    home = residence_of(model, running.job.layout)
    gathered = partial(_gathered, home=home, ranks=ranks)
    if home.replica != first_left(running):
        gathered = _nothing
    state = state_of(model, None)
    if path.name.endswith(INDEX_SUFFIX):
        _save_several(state, gathered, path, ranks)
        return
    whole = gathered(state)
    ranks.lead(f"cannot write {path}", lambda: _write(whole, path))


def _nothing(state: list[StateTensor]) -> dict[str, Tensor]:
    """For ranks of other replicas, which gather nothing."""
    return {}


def _save_several(
    state: list[StateTensor],
    gathered: Callable[[list[StateTensor]], dict[str, Tensor]],
    path: Path,
    ranks: Unanimous,
) -> None:
    """Files of new names, then their index."""
    parts, token = _parted(state), secrets.token_hex(4)
    stem = path.name.removesuffix(INDEX_SUFFIX)
    files = [
        path.with_name(f"{stem}-{token}-{k:05}-of-{len(parts):05}{SUFFIX}")
        for k in range(1, len(parts) + 1)
    ]
    names = {s.name: file.name for part, file in zip(parts, files, strict=True) for s in part}
    nbytes = sum(s.tensor.numel() * s.tensor.element_size() for s in state)
    index = {"metadata": {"total_size": nbytes}, "weight_map": names}
    try:
        for part, file in zip(parts, files, strict=True):
            written = partial(_write, gathered(part), file)
            ranks.lead(f"cannot write {path}", written)
        ranks.lead(f"cannot write {path}", lambda: _write_index(path, index))
    except BaseException:
        if ranks.leads and not _names_files(path, token):
            for file in files:
                file.unlink(missing_ok=True)
        raise
    ranks.lead(f"cannot write {path}", lambda: _remove_earlier(path, token))


def _gathered(state: list[StateTensor], home: Residence, ranks: Unanimous) -> dict[str, Tensor]:
    """The whole tensors by name, on the first rank."""
    whole: dict[str, Tensor] = {}
    for s in state:
        full = _at_first_rank(s, home, ranks)
        if full is not None:
            whole[s.name] = full.cpu().contiguous().clone()
    return whole


def _parted(state: list[StateTensor]) -> list[list[StateTensor]]:
    """The state in runs of at most `FILE_NBYTES`."""
    parts: list[list[StateTensor]] = [[]]
    held = 0
    for s in state:
        nbytes = s.tensor.numel() * s.tensor.element_size()
        if parts[-1] and held + nbytes > FILE_NBYTES:
            parts.append([])
            held = 0
        parts[-1].append(s)
        held += nbytes
    return parts


def _write(whole: dict[str, Tensor], path: Path) -> str:
    metadata = {"format": "pt", CHECKSUM: checksum((n, whole[n]) for n in sorted(whole))}

    def write(draft: Path) -> None:
        try:
            save_file(whole, str(draft), metadata=metadata)
        except SafetensorError as error:  # it wraps the system's error
            raise OSError(0, str(error), str(path)) from error

    return _by_rename(path, write)


def _write_index(path: Path, index: dict[str, Any]) -> str:
    return _by_rename(path, lambda draft: draft.write_text(json.dumps(index, indent=2) + "\n"))


def _by_rename(path: Path, write: Callable[[Path], Any]) -> str:
    """Write a draft, then let it take the place of `path`, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_drafts(path)
    draft = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.draft")
    try:
        write(draft)
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


def _names_files(path: Path, token: str) -> bool:
    """Whether the index is that of a save: one can fail after it is visible, by the loss of a rank."""
    try:
        return f"-{token}-" in path.read_text()
    except OSError:
        return False


def _remove_earlier(path: Path, token: str) -> str:
    """Remove the files of earlier saves, complete or not, which the index does not name any more."""
    stem = re.escape(path.name.removesuffix(INDEX_SUFFIX))
    known = re.compile(rf"\.?{stem}-([0-9a-f]{{8}})-\d{{5}}-of-\d{{5}}\.safetensors(\..*\.draft)?")
    for file in path.parent.iterdir():
        match = known.fullmatch(file.name)
        if match is not None and match[1] != token:
            file.unlink(missing_ok=True)
    return ""


def _at_first_rank(s: StateTensor, home: Residence, ranks: Unanimous) -> Tensor | None:
    """All of a state tensor on the first rank, None elsewhere.

    Another pipeline rank may keep it, and several may: then all ranks must choose the same one.
    """
    x = s.tensor.detach()
    if not isinstance(x, DTensor):
        return x if ranks.leads else None
    mesh, first, rank = home.layout.mesh, ranks.first_rank, dist.get_rank()
    leads = mesh.coordinates(first)
    keeper = home.keeper(s.name, leads.get("pipe", 0))
    full = x.full_tensor() if mesh.coordinates(rank).get("pipe", 0) == keeper else None
    source = mesh.rank(leads | {"pipe": keeper}) if "pipe" in leads else first
    if rank == source != first:
        assert full is not None
        dist.send(full.contiguous(), first)
    if source != first and ranks.leads:
        full = torch.empty(x.shape, dtype=x.dtype, device=local_of(x).device)
        dist.recv(full, source)
    return full if ranks.leads else None


def load(running: Running, path: Path, ranks: Unanimous) -> None:
    """Parameters and buffers by name; files may leave out buffers and tied names.

    Each rank reads its own parts. A model on the meta device takes them at the first call, which decides
    the parts; the files must last until then.

    Raises:
        CheckpointError: on every rank, a file cannot be read, is damaged, or is of another model.
    """
    model = running.job.model
    state = state_of(model, None)
    what = f"cannot read {path}"
    found: dict[str, StoredTensor] = {}
    ranks.lead(what, lambda: _verified(path))
    ranks.each(what, lambda: _check(model, state, path, found))
    for s in state:
        STORED.pop(s.tensor, None)
        if s.tensor.is_meta and s.name in found:
            STORED[s.tensor] = found[s.name]
    parts: dict[str, Tensor] = {}
    here = {s.name: s.tensor for s in state if not s.tensor.is_meta and is_here(s.tensor)}

    def read() -> str:
        parts.update({n: part_of(found[n].whole(), x) for n, x in here.items() if n in found})
        return ""

    ranks.each(what, read)
    for name, part in parts.items():
        set_local(here[name], part)


def _verified(path: Path) -> str:
    for file in files_of(stored_in(path).values()):
        verify(file)
    return ""


def _check(
    model: nn.Module, state: list[StateTensor], path: Path, found: dict[str, StoredTensor]
) -> str:
    """Find the stored tensor of each parameter and of the buffers that the files have."""
    stored = stored_in(path)
    names = dict(_names(model, state))
    for s in state:
        at = next((n for n in (s.name, *names[s.name]) if n in stored), None)
        if at is not None:
            found[s.name] = stored[at]
    kinds = {s.name: s.kind for s in state}
    needed = {s.name: s.tensor for s in state if kinds[s.name] == "parameter" or s.name in found}
    tied = {n for others in names.values() for n in others}
    extra = {n: one.shape for n, one in stored.items() if n not in names and n not in tied}
    check_names(extra | {n: one.shape for n, one in found.items()}, needed, str(path))
    return ""


def _names(model: nn.Module, state: list[StateTensor]) -> Iterator[tuple[str, list[str]]]:
    """Each state tensor's name, and its further names in the model."""
    every: dict[int, list[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        every.setdefault(id(x), []).append(name)
    for name, x in model.named_buffers(remove_duplicate=False):
        every.setdefault(id(x), []).append(name)
    for s in state:
        yield s.name, [n for n in every.get(id(s.tensor), ()) if n != s.name]
