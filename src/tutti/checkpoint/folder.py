"""The folder of a checkpoint: a save writes beside the last one and replaces it by one rename."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path

from tutti.checkpoint.digest import FileDigest, find_damage
from tutti.checkpoint.manifest import MANIFEST, STATE_FOLDER, Manifest
from tutti.checkpoint.owner_lock import OwnerLock, lock_folder
from tutti.durable import sync_folder
from tutti.errors import CheckpointError
from tutti.remote_paths import is_remote, remove_tree

INDEX = ".metadata"
_NEW = ".new"
# Files of format 1.
_EARLIER = re.compile(r"__\d+_\d+\.distcp")


def open_folder(path: Path, seconds: float = 0.0) -> OwnerLock:
    """Make the folder if it is missing, and lock it; wait up to `seconds` for another owner.

    Raises:
        CheckpointError: another run saves there, or the folder holds a checkpoint of another program.
        OSError: the folder cannot be made or written.
    """
    refuse_dangling(path)
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    if made:
        sync_folder(path.parent)
    lock = lock_folder(path, seconds)
    if (path / INDEX).exists() and not (path / MANIFEST).exists():
        raise CheckpointError(
            f"{path} holds a checkpoint of another program",
            why=f"it has {INDEX}, and no {MANIFEST}",
            fix="another folder, or remove that checkpoint",
        )
    return lock


def refuse_dangling(path: Path) -> None:
    """Refuse a link to nothing, which looks like no folder until one is made. Raises `CheckpointError`."""
    if not is_remote(path) and path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{path} is a link to nothing",
            why=f"there is no {path.readlink()}",
            fix="mount or make that folder, or remove the link",
        )


def new_state_folder(path: Path) -> str:
    """Make a folder for the files of a new save, and remove those of unfinished saves.

    Returns its name. Only the owner of the lock calls this.
    """
    _remove_states(path, keep=_current(path))
    name = f"state-{secrets.token_hex(8)}"
    (path / name).mkdir()
    return name


def commit(path: Path, folder: str, manifest: str, index: bytes) -> None:
    """Make the files in `folder` the checkpoint of `path`: durable first, then visible by one rename.

    Every rank has synced its own files. `index` is for plain PyTorch. This removes the files of the last save
    once nothing names them.
    """
    sync_folder(path / folder)
    if is_remote(path):  # a file appears whole
        (path / MANIFEST).write_bytes(manifest.encode())
        (path / INDEX).write_bytes(index)
    else:
        drafts = [_draft(path / MANIFEST, manifest.encode()), _draft(path / INDEX, index)]
        for draft in drafts:  # a full disk has failed by now: a rename needs no room
            draft.replace(draft.with_name(draft.name.removesuffix(_NEW)))
            sync_folder(path)
    _remove_states(path, keep=folder)
    for file in path.iterdir():
        if _EARLIER.fullmatch(file.name):
            file.unlink()


def index_damage(path: Path, manifest: Manifest, *, check: bool = True) -> str:
    """The damage of the index for plain PyTorch; "" if there is none, or an earlier tutti has saved it.

    Args:
        check: compare checksums, too.
    """
    if manifest.index is None:
        return ""
    digest = manifest.index if check else FileDigest(manifest.index.nbytes, ())
    damage = find_damage(path, {INDEX: digest})
    return f"the index of torch.distributed.checkpoint is damaged: {damage}" if damage else ""


def abandon(path: Path, folder: str) -> None:
    """Remove the files of a failed save, unless it is the checkpoint already.

    A save can fail after it is visible: by the loss of a rank before all have met again.
    """
    if _current(path) not in (None, folder):
        remove_tree(path / folder)


def _draft(file: Path, content: bytes) -> Path:
    """Write the new content of `file` beside it, durable; return the draft."""
    new = file.with_name(file.name + _NEW)
    with open(new, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return new


def _remove_states(path: Path, *, keep: str | None) -> None:
    for folder in path.iterdir() if keep is not None else ():
        if STATE_FOLDER.fullmatch(folder.name) and folder.name != keep:
            remove_tree(folder)  # what stays only takes room


def _current(path: Path) -> str | None:
    """The folder that the manifest names, "" without one; None if it is unknown."""
    try:
        found = json.loads((path / MANIFEST).read_text())["folder"]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and (path / found).exists() else None
