"""Reads the kernel's counts of processes killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

# The kernel's counters: of this process's control group (version 2, version 1), and of the machine.
_GROUP, _MACHINE = "this run's control group", "this machine"


class MemoryKills:
    """Counts kills since its construction.

    Args:
        root: the parent directory of `/proc` and `/sys`.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = [(where, path) for where, path in _counters(root) if _count(path) is not None]
        self._before = {path: _count(path) or 0 for _, path in self._files}

    def said(self) -> str:
        """A text about kills since the construction, for a process with a SIGKILL from elsewhere."""
        for where, path in self._files:
            number = (_count(path) or 0) - self._before[path]
            if number > 0:
                what = "1 process" if number == 1 else f"{number} processes"
                return f"perhaps out of memory: the kernel has killed {what} of {where} for that"
        if self._files:
            return "sent neither by the launcher nor by the kernel for want of memory"
        return "not sent by the launcher"


def _counters(root: Path) -> list[tuple[str, Path]]:
    """Files with a line "oom_kill <number>"."""
    found: list[tuple[str, Path]] = []
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else []:
        number, kinds, path = line.split(":", 2)
        if number == "0":
            base, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in kinds.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # In a container its own group may appear as the root.
        places = (base / path.lstrip("/") / name, base / name)
        found += [(_GROUP, place) for place in places if place.exists()][:1]
    return [*found, (_MACHINE, root / "proc/vmstat")]


def _count(path: Path) -> int | None:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
        return next((int(word[1]) for word in words if word[0] == "oom_kill"), None)
    except (OSError, ValueError, IndexError):
        return None
