"""Files that are whole or not there, folders that can be written, names that survive a power failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tutti.errors import TuttiError
from tutti.remote_paths import is_remote


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk; a remote one keeps them itself."""
    if is_remote(folder):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file by a draft beside it: readers see the old one or the new one, whole.

    Raises `OSError`, and leaves no draft.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def check_writable(
    folder: Path, what: str, fix: str, clear: Callable[[], Iterable[Path]] = tuple
) -> None:
    """Make the folder of a log, a report or a trace (`what`), and remove the files of `clear` from it.

    Raises:
        TuttiError: it cannot be made or written to.
    """
    try:
        make_writable(folder)
        for file in clear():
            file.unlink()
    except OSError as error:
        raise TuttiError(
            f"no {what} can be written to {folder}",
            why=str(error),
            fix=fix,
        ) from error


def check_file(path: Path, what: str) -> None:
    """Try to open a file (`what`) that a long command will write at its end.

    Raises:
        TuttiError: it cannot be written, or its folder is not there.
    """
    try:
        there = path.exists()
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise TuttiError(
            f"cannot write {what} {path}",
            why=str(error.strerror),
            fix="a file in a folder that is there, and that you may write to",
        ) from None


def make_writable(folder: Path) -> None:
    """Make a folder, and try to write to it. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{os.getpid()}"
    probe.touch()
    probe.unlink(missing_ok=True)  # of a process of another host, with this number
