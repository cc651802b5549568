"""The manifest of a checkpoint: its files, their checksums, and their tensors.

It is JSON with its own checksum. The rename that puts it in place makes a save visible:

    checkpoint/
        tutti.json               the manifest; names the folder below
        state-3f0c.../           the shards and `.metadata` of `torch.distributed.checkpoint`
        .metadata                the same index for plain PyTorch; tutti does not read it
        lock                     held by the run that saves here
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.digest import FileDigest
from tutti.errors import CheckpointError

# Format 1 has its files beside the manifest, and no checksums.
FORMAT = 2
MANIFEST = "tutti.json"
# The checkpoint of a step in the folder of a run.
STEP_FOLDER = re.compile(r"step-(\d{8,})")
USE_EARLIER = "use an earlier checkpoint"
STATE_FOLDER = re.compile(r"state-[0-9a-f]{16}")


@dataclass(frozen=True)
class TensorForm:
    """The global shape and the dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    layout, replicas: those of the save.  tensors: by name.  folder: of its files, "" for the folder of the
    manifest.  files: by name in that folder.  extra: the user's values.  groups: the hyper-parameters of
    each optimizer's groups, none in an earlier manifest.  index: of the index for plain PyTorch; None in an
    earlier manifest.
    """

    layout: str
    replicas: str
    tensors: Mapping[str, TensorForm]
    folder: str
    files: Mapping[str, FileDigest]
    extra: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT
    groups: list[Any] = field(default_factory=list)
    index: FileDigest | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        forms = self.tensors.values()
        return sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in forms)

    def text(self) -> str:
        """The JSON of the file."""
        body = {
            "format": self.format,
            "layout": self.layout,
            "replicas": self.replicas,
            "tensors": {n: [list(t.shape), dtype_name(t.dtype)] for n, t in self.tensors.items()},
            "folder": self.folder,
            "files": {n: _entry(f) for n, f in self.files.items()},
            "extra": self.extra,
            "groups": self.groups,
            "index": None if self.index is None else _entry(self.index),
        }
        return json.dumps(body | {"sha256": _checksum(body)})


def read_manifest(path: Path) -> str:
    """The text of the manifest in folder `path`.

    Raises:
        CheckpointError: there is none, or it is unreadable.
    """
    file = path / MANIFEST
    try:
        return file.read_text()
    except FileNotFoundError:
        there = path.exists()
        if there and (newest := _newest_step(path)) is not None:
            raise CheckpointError(
                f"{path} is the folder of a run, not a checkpoint",
                why="tutti.Checkpoints keeps a checkpoint for each saved step in it",
                fix=f'the newest is "{newest}"; or tutti.Checkpoints("{path}", step=step).restore()',
            ) from None
        why = f"it has no {MANIFEST}, which a save writes last" if there else "no such directory"
        what = f"{path} is not a whole checkpoint"
        raise CheckpointError(what, why=why, fix=USE_EARLIER) from None
    except NotADirectoryError:
        raise CheckpointError(
            f"{path} is a file, not a checkpoint",
            why="step.save makes a directory, or a file that ends in .safetensors",
            fix="for a file of torch.save with the model alone: with step.whole(): "
            f'model.load_state_dict(torch.load("{path}"))',
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read", why=str(error), fix=USE_EARLIER) from error


def _newest_step(path: Path) -> Path | None:
    """The checkpoint of the last step in the folder of a run; None if it is none."""
    try:
        steps = [
            p for p in path.iterdir() if STEP_FOLDER.fullmatch(p.name) and (p / MANIFEST).exists()
        ]
    except OSError:
        return None
    return max(steps, key=lambda p: int(p.name.partition("-")[2]), default=None)


def parse_manifest(text: str, path: Path) -> Manifest:
    """Parse the manifest of folder `path`.

    Raises:
        CheckpointError: the text is no manifest, has another checksum, or a newer tutti wrote it.
    """
    file = path / MANIFEST
    try:
        body = json.loads(text)
        version = body["format"]
        if not isinstance(version, int) or version < 1:
            raise ValueError(f"format {version!r}")
        if version > FORMAT:
            raise CheckpointError(
                f"{path} has format {version}; this version of tutti reads up to {FORMAT}",
                why="a newer tutti wrote it",
                fix="upgrade tutti",
            )
        said = body.pop("sha256", None)
        if (version > 1 or said is not None) and said != _checksum(body):
            raise CheckpointError(
                f"{file} is damaged: its checksum is another",
                why="a bit changed after the file was written",
                fix=USE_EARLIER,
            )
        return _manifest(body, version)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file} cannot be read", why=why, fix=USE_EARLIER) from error


def _manifest(body: dict[str, Any], version: int) -> Manifest:
    folder = str(body.get("folder", ""))
    if folder and not STATE_FOLDER.fullmatch(folder):
        raise ValueError(f"a folder named {folder!r}")
    return Manifest(
        layout=str(body["layout"]),
        replicas=str(body.get("replicas", "")),
        tensors={n: _form(*form) for n, form in body["tensors"].items()},
        folder=folder,
        files={_plain(n): _file(f) for n, f in body["files"].items()},
        extra=dict(body["extra"]),
        format=version,
        groups=list(body.get("groups", [])),
        index=None if body.get("index") is None else _file(body["index"]),
    )


def _form(shape: list[int], dtype: str) -> TensorForm:
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"a tensor of shape {shape!r}")
    return TensorForm(tuple(shape), dtype_of(dtype))


def _entry(file: FileDigest) -> list[Any]:
    return [file.nbytes, list(file.sha256)]


def _file(found: Any) -> FileDigest:
    nbytes, sha256 = (found, []) if isinstance(found, int) else found
    if type(nbytes) is not int or not all(isinstance(x, str) for x in sha256):
        raise ValueError(f"a file of {nbytes!r} bytes")
    return FileDigest(nbytes, tuple(sha256))


def _plain(name: str) -> str:
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"a file named {name!r}")
    return name


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of such a name. Raises `AttributeError` or `ValueError` for another text."""
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a tensor of dtype {name!r}")
    return found


def _checksum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
