"""Whether a process of this host still lives."""

from __future__ import annotations

import os
import select
from weakref import WeakValueDictionary


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (proc(5)); none where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(pid: int) -> str:
    """The state: "S" (asleep), "T" (stopped), "Z" (a zombie), ...; "" if there is no such process."""
    return next(iter(stat_of(pid)), "")


class Life:
    """Whether a process has ended, even if another process has its id or its parent has not reaped it."""

    def __init__(self, pid: int) -> None:
        self._pid, self._fd = pid, -1
        self._poll = select.poll()
        try:
            self._fd = os.pidfd_open(pid)
            self._poll.register(self._fd, select.POLLIN)
        except (OSError, AttributeError):  # no such process, too many files, or an old kernel
            self._fd = -1

    @classmethod
    def of(cls, pid: int) -> Life:
        """The `Life` of `pid`: all groups of this process share it, and its descriptor."""
        life = _LIVES.get(pid)
        if life is None or life.ended():  # another process may have its id
            life = _LIVES[pid] = cls(pid)
        return life

    def ended(self) -> bool:
        """Whether it has ended: a zombie has."""
        if self._fd >= 0:
            return bool(self._poll.poll(0))
        return state_of(self._pid) in ("", "Z", "X")

    def said(self) -> str:
        """A note for errors about a stopped process; "" for any other."""
        return f" (process {self._pid} is stopped)" if state_of(self._pid) in ("T", "t") else ""

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


_LIVES: WeakValueDictionary[int, Life] = WeakValueDictionary()
