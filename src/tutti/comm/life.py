"""Whether a process of this host still lives."""

from __future__ import annotations

import os
import select
from weakref import WeakValueDictionary


class Life:
    """Whether a process has ended, also when its number is taken again or its parent has not asked."""

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
        """The one that looks at `pid`: all groups of this process share it, and its descriptor."""
        life = _LIVES.get(pid)
        if life is None or life.ended():  # its number may be taken again
            life = _LIVES[pid] = cls(pid)
        return life

    def ended(self) -> bool:
        """Whether it has ended: a zombie has."""
        if self._fd >= 0:
            return bool(self._poll.poll(0))
        return self._state() in ("", "Z", "X")

    def said(self) -> str:
        """What there is to say of a process that does not come."""
        return f" (process {self._pid} is stopped)" if self._state() in ("T", "t") else ""

    def _state(self) -> str:
        try:
            with open(f"/proc/{self._pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


_LIVES: WeakValueDictionary[int, Life] = WeakValueDictionary()
