"""A run's private directory, which does not outlive the run, however its launcher ends.

launcher ends by itself      it removes the directory
launcher is killed           a cleaner, a shell that waits for the launcher's end, removes it
both are killed              the next run on this host does, since the owner recorded in it is dead
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from tutti.comm.host.hosts import host_name
from tutti.comm.host.life import stat_of
from tutti.durable import check_writable
from tutti.errors import TuttiError

_PREFIX, _OWNER, _PROBE = "tutti-", "owner", "probe"
# What the disk must have left at the start.
_ROOM_NBYTES, _ROOM_FILES = 256 * 1024, 64
# The ranks die with the launcher, but not at once: they may still write.
_CLEAN = (
    "cat >/dev/null; n=0; "
    'while [ -e "$1" ] && [ $n -lt 50 ]; do rm -rf -- "$1"; n=$((n+1)); [ -e "$1" ] && sleep 0.2; done'
)


class RunDir:
    """A new private directory for one run, `path`, and its cleaner.

    Raises:
        TuttiError: its disk has no room for the small files of a run, by which the launcher knows the ranks.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        remove_stale(parent)
        try:
            self.path = _made_in(parent)
        except OSError as error:
            raise without_room(parent, error) from None
        self._cleaner: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # no shell: the next run cleans up
            self._cleaner = subprocess.Popen(  # noqa: S603  # our own script and path, no text in it
                ["/bin/sh", "-c", _CLEAN, "tutti-cleaner", str(self.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    def remove(self) -> None:
        """Remove the directory; the cleaner removes the rest later."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._cleaner is None:
            return
        assert self._cleaner.stdin is not None
        if not self.path.exists():
            self._cleaner.kill()
            self._cleaner.wait()
        self._cleaner.stdin.close()
        self._cleaner = None


def _made_in(parent: Path) -> Path:
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        (path / _OWNER).write_text(_owner(os.getpid()))
        (path / _PROBE).write_bytes(bytes(_ROOM_NBYTES))
        (path / _PROBE).unlink()
        disk = os.statvfs(path)
        if disk.f_files and disk.f_favail < _ROOM_FILES:
            raise OSError(errno.ENOSPC, f"there is room for {disk.f_favail} more files only")
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def without_room(directory: Path, error: OSError) -> TuttiError:
    """The error of a run whose own files find no room in `directory`."""
    return TuttiError(
        f"no room in {directory} for the small files by which a run's processes know each other",
        why=str(error.strerror),
        fix="free space there, or TMPDIR with another directory",
    )


def check_log_dir(folder: Path) -> None:
    """Make the folder for the output of ranks.

    Raises:
        TuttiError: it cannot be made or written to.
    """
    check_writable(folder, "log", "--log-dir with a folder that you may write to")


def remove_stale(directory: Path) -> None:
    """Remove directories of this user's runs whose launchers and cleaners have died."""
    for path in directory.glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(OSError, ValueError):
            own = path.parent.lstat().st_uid == os.getuid() and not path.parent.is_symlink()
            text = path.read_text() if own else ""
            if text and not _lives(text):
                shutil.rmtree(path.parent, ignore_errors=True)


def _owner(pid: int) -> str:
    return f"{pid} {_started(pid)} {host_name()}"


def _lives(owner: str) -> bool:
    """Whether the process of an `_owner` may still live; one of another host may."""
    pid, _, host = owner.split(" ", 2)
    return host != host_name() or owner == _owner(int(pid))


def _started(pid: int) -> str:
    """The start of a process in ticks since the boot; "" if there is no process, "0" if unknown."""
    if not Path("/proc/self/stat").exists():
        return "0"
    return next(iter(stat_of(pid)[19:20]), "")
