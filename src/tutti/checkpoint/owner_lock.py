"""A file lock with the name of its owner: only one run at a time saves into a folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import warnings
from pathlib import Path
from weakref import WeakValueDictionary

from tutti.comm.host.life import state_of
from tutti.errors import CheckpointError
from tutti.remote_paths import is_remote
from tutti.user_lines import users_level

LOCK = "lock"
_LOOK_SECONDS = 0.05
# How long the lock of a killed run may outlive it: a process that writes its saves ends after it.
_HEIR_SECONDS = 10.0


class OwnerLock:
    """The right to save into a folder, for as long as a step holds this and its process lives.

    All steps of a process share one. The kernel releases the lock when the process ends, however it ends.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def fd(self) -> int:
        """The descriptor: a process that has it, too, keeps the folder locked."""
        return self._fd

    def __del__(self) -> None:
        self.close()

    def is_of(self, folder: Path) -> bool:
        """Whether this is the lock of `folder`; not of a removed folder, even with the same inode number."""
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.stat(folder / LOCK))
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_folder(folder: Path, seconds: float = 0.0) -> OwnerLock:
    """Lock `folder`, which exists; waits up to `seconds` for another owner.

    A remote folder has no lock: nothing hinders another run.

    Raises:
        CheckpointError: another process still holds it; names that process, its host and the time.
        OSError: the lock file cannot be made.
    """
    if is_remote(folder):
        return OwnerLock(-1)
    found = os.stat(folder)
    key = (found.st_dev, found.st_ino)
    held = _HELD.get(key)
    if held is None or not held.is_of(folder):
        held = _HELD[key] = OwnerLock(_locked(folder, seconds))
    return held


def _locked(folder: Path, seconds: float) -> int:
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(fd, max(seconds, _HEIR_SECONDS if _has_ended(fd) else 0.0))
    except BlockingIOError as error:
        owner = os.pread(fd, 4096, 0).decode(errors="replace")
        os.close(fd)
        raise CheckpointError(
            f"another run saves into {folder}",
            why=_described(owner),
            fix="a folder of its own for each run, or end that run",
        ) from error
    except OSError as error:
        warnings.warn(
            f"{folder} cannot be locked ({error.strerror}): two runs that save there destroy each "
            "other's checkpoints",
            stacklevel=users_level(),
        )
        return fd
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(owner).encode(), 0)
    return fd


def _take(fd: int, seconds: float) -> None:
    """Lock the file; `BlockingIOError` if another process still holds it after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
        time.sleep(_LOOK_SECONDS)


def _has_ended(fd: int) -> bool:
    """Whether the owner is a process of this host that has ended: one that writes its saves is about to."""
    try:
        found = json.loads(os.pread(fd, 4096, 0))
        return found["host"] == socket.gethostname() and not state_of(found["pid"])
    except (ValueError, KeyError, TypeError):
        return False


def _described(owner: str) -> str:
    try:
        found = json.loads(owner)
        return f"process {found['pid']} on {found['host']} holds it since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "its owner has not written its name yet"


def _forget() -> None:
    """A forked child (a data loader's) does not keep the lock of a run that has ended."""
    for held in list(_HELD.values()):
        held.close()
    _HELD.clear()


_HELD: WeakValueDictionary[tuple[int, int], OwnerLock] = WeakValueDictionary()
os.register_at_fork(after_in_child=_forget)
