"""A model's weights in files as Hugging Face has them: one `.safetensors`, or several with an index.

    model.safetensors                      one file
    model.safetensors.index.json           the file of each tensor; written last
    model-3f0c2a9e-00001-of-00002.safetensors

A read takes a rank's part of a tensor alone, in pieces of `PIECE_NBYTES`: the pages of a file leave the
memory of the process with each piece.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tutti.checkpoint.manifest import MANIFEST, USE_EARLIER
from tutti.comm.collectives.payload import octets
from tutti.errors import CheckpointError

ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
CHECKSUM = "tutti.sha256"
PIECE_NBYTES = 2**24


def weights_at(path: Path) -> Path | None:
    """The file or the index of the weights at `path`; None if `path` is no place of weights alone.

    A directory has them if it holds `model.safetensors` or its index, and no checkpoint of tutti.
    """
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return path
    if path.is_dir() and not (path / MANIFEST).exists():
        return next((path / n for n in (INDEX_FILE, ONE_FILE) if (path / n).exists()), None)
    return None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, with its global shape."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def whole(self) -> Tensor:
        """All of it, in memory of its own."""
        return self.part([None] * len(self.shape))

    def part(self, index: Sequence[Tensor | None]) -> Tensor:
        """The elements at `index`, for each dim the indices (int64, ascending) or None for all.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if not self.shape:
            with opened(self.file) as file:
                return file.get_tensor(self.name).clone()
        rows = torch.arange(self.shape[0]) if index[0] is None else index[0]
        sizes = [n if at is None else len(at) for n, at in zip(self.shape, index, strict=True)]
        if not len(rows):
            with opened(self.file) as file:
                return file.get_slice(self.name)[0:0].reshape(sizes)
        made = torch.empty(0)
        for begin, run in self._pieces(rows):
            with opened(self.file) as file:
                block = file.get_slice(self.name)[run.start : run.stop]
                for dim, at in enumerate(index[1:], 1):
                    block = block if at is None else block.index_select(dim, at)
                if not begin:
                    made = torch.empty(sizes, dtype=block.dtype)
                made[begin : begin + len(run)] = block
                del block
        return made

    def _pieces(self, rows: Tensor) -> Iterator[tuple[int, range]]:
        """Runs of consecutive rows, each of at most `PIECE_NBYTES`, with the position of the first."""
        with opened(self.file) as file:
            row = file.get_slice(self.name)[0:1].nbytes
        most = max(1, PIECE_NBYTES // max(1, row))
        ends = (rows.diff() != 1).nonzero().flatten().add(1).tolist() if len(rows) > 1 else []
        for begin, end in zip([0, *ends], [*ends, len(rows)], strict=True):
            for at in range(begin, end, most):
                first = int(rows[at])
                yield at, range(first, first + min(most, end - at))


def stored_in(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the weights at `path`, a file or an index, by name.

    Raises:
        CheckpointError: a file is missing or cannot be read, or lacks a tensor of the index.
    """
    if not path.name.endswith(INDEX_SUFFIX):
        return _stored(path)
    files: dict[str, dict[str, StoredTensor]] = {}
    found: dict[str, StoredTensor] = {}
    for name, file in _index(path).items():
        if file not in files:
            files[file] = _stored(path.with_name(file))
        if name not in files[file]:
            raise CheckpointError(
                f"cannot read {path}",
                why=f'it names "{name}" in {file}, which has no such tensor',
                fix="files of one save",
            )
        found[name] = files[file][name]
    return found


def _index(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        if not all(isinstance(n, str) and isinstance(f, str) for n, f in found.items()):
            raise TypeError("weight_map maps names to files")
        for file in found.values():
            if Path(file).name != file or not file.endswith(SUFFIX):
                raise ValueError(f'it names the file "{file}"')
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fix = "an index as Hugging Face writes it: a file of its folder for each tensor"
        raise CheckpointError(f"cannot read {path}", why=repr(error), fix=fix) from error
    return found


def _stored(path: Path) -> dict[str, StoredTensor]:
    with opened(path) as file:
        names: list[str] = list(file.keys())
        return {n: StoredTensor(path, n, tuple(file.get_slice(n).get_shape())) for n in names}


def files_of(stored: Iterable[StoredTensor]) -> list[Path]:
    """The files that hold these tensors."""
    return sorted({one.file for one in stored})


def verify(path: Path) -> None:
    """Compare the checksum of a file, if it has one: other programs write none.

    Raises:
        CheckpointError: the file is damaged.
    """
    with opened(path) as file:
        said, names = (file.metadata() or {}).get(CHECKSUM), sorted(file.keys())
    if said is not None and said != checksum((n, _read(path, n)) for n in names):
        raise CheckpointError(
            f"{path} is damaged: its tensors have another checksum",
            why="a bit changed after the file was written",
            fix=USE_EARLIER,
        )


def _read(path: Path, name: str) -> Tensor:
    with opened(path) as file:
        return file.get_tensor(name)


def opened(path: Path) -> Any:
    """The file, open; `CheckpointError` if it is no whole file of tensors."""
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        fix = "a whole file in the safetensors format"
        raise CheckpointError(f"cannot read {path}", why=str(error), fix=fix) from error


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The checksum of names, dtypes, shapes and bytes, in the given order, which is by name."""
    found = hashlib.sha256()
    for name, x in tensors:
        found.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        found.update(octets(x))
    return found.hexdigest()
