"""Reads the index of `torch.distributed.checkpoint`, a pickle, without running its code.

It builds only the classes of such an index, and takes only the descriptions of tensors from it. It refuses a
file that names anything else, with that name.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from tutti.checkpoint.folder import INDEX
from tutti.errors import CheckpointError
from tutti.remote_paths import is_remote
from tutti.torch_private.checkpoint_parts import (
    MEMORY_FORMATS,
    StorageInfo,
    layout_by_name,
    remote_files,
)

_ALLOWED: dict[tuple[str, str], Any] = {
    (found.__module__, found.__qualname__): found
    for found in (
        Metadata,
        StorageMeta,
        TensorStorageMetadata,
        ChunkStorageMetadata,
        TensorProperties,
        MetadataIndex,
        MEMORY_FORMATS,
        StorageInfo,
        layout_by_name,
    )
} | {("torch", "Size"): torch.Size}
# An index names its folder at the time of the save.
_ALLOWED |= {
    (module, name): PurePath
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
_FIX = "load checkpoints that you or somebody you trust has saved"


class _Unpickler(pickle.Unpickler):
    """Builds only the classes on the list."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        found = _ALLOWED.get((module, name))
        if (
            found is None
            and module == "torch"
            and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            found = getattr(torch, name)
        if found is None:
            raise _named(f"{module}.{name}")
        return found


def _memory_format(kind: Any, name: Any) -> Any:
    """A memory format by its name. Python 3.11.0 to 3.11.3 write every member of an enumeration as a call of
    `getattr`; later versions do not."""
    if kind is not MEMORY_FORMATS or name not in MEMORY_FORMATS.__members__:
        raise _named("builtins.getattr")
    return MEMORY_FORMATS[name]


class CheckedReader(FileSystemReader):
    """Reads shards of tensors from `folder`, and only files that are `known` there.

    Raises:
        CheckpointError: from `read_metadata`, if the index names anything else.
    """

    def __init__(self, folder: Path, known: Collection[str]) -> None:
        super().__init__(str(folder))
        if is_remote(folder):
            self.fs = remote_files()
            self.path = self.fs.init_path(str(folder))
        self._folder, self._known = folder, frozenset(known)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, from a pickle of which every name is on the list."""
        with (self._folder / INDEX).open("rb") as file:
            found = _unpickled(file)
        try:
            self._check(found)
        except (AttributeError, TypeError) as error:
            raise _no_index(str(error)) from error
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found

    def _check(self, found: Metadata) -> None:
        if type(found) is not Metadata:
            raise _no_index(f"it holds a {type(found).__name__}")
        for name, form in found.state_dict_metadata.items():
            if type(form) is not TensorStorageMetadata:
                raise _no_index(f"{name} is not described as a tensor")
        for index, place in found.storage_data.items():
            if place.relative_path not in self._known or place.transform_descriptors:
                raise _no_index(f"{index.fqn} lies in {place.relative_path}")


class TensorPlanner(DefaultLoadPlanner):
    """Fills tensors; refuses an entry with a pickled object."""

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        """No entry of a checkpoint is an object."""
        raise _no_index(f"{read_item.dest_index.fqn} is an object, not a tensor")


def _unpickled(file: IO[bytes]) -> Any:
    try:
        return _Unpickler(file).load()
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a pickle can raise anything
        raise _no_index(f"{type(error).__name__}: {error}") from error


def _named(name: str) -> CheckpointError:
    return CheckpointError(
        f"the index of the checkpoint names {name}",
        why="it is a pickle that would run code, and no index of tensors has this name",
        fix=_FIX,
    )


def _no_index(why: str) -> CheckpointError:
    return CheckpointError("the index of the checkpoint cannot be read", why=why, fix=_FIX)
