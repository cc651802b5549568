"""Files and directories that only their owner may open, regardless of the process's umask."""

from __future__ import annotations

import os
from pathlib import Path

_FILE, _DIRECTORY = 0o600, 0o700


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file of mode 0600, created if `flags` say so.

    Raises:
        OSError: the open fails.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE)
    try:
        os.fchmod(fd, _FILE)
    except OSError:
        os.close(fd)
        raise
    return fd


def make_private(directory: Path) -> None:
    """Make a directory of mode 0700, and missing parents with the same mode.

    Raises:
        OSError: it cannot be created, or belongs to another user.
    """
    missing = [p for p in (directory, *directory.parents) if not p.exists()]
    for path in reversed(missing):
        path.mkdir(mode=_DIRECTORY, exist_ok=True)
        path.chmod(_DIRECTORY)
    directory.chmod(_DIRECTORY)


def write_private(path: Path, text: str, *, fsync: bool = False) -> None:
    """Write `text` atomically to the file at `path`.

    Raises:
        OSError: there is no room.
    """
    draft = path.with_name(f"{path.name}.new")
    with open(open_private(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(text)
        file.flush()
        if fsync:
            os.fsync(file.fileno())
    draft.rename(path)
