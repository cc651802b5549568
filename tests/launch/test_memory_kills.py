"""What is said of a rank that got a SIGKILL: out of memory only where the kernel counts that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.launch.memory_kills import MemoryKills

GROUPS = {
    "version 2": ("0::/run", "sys/fs/cgroup/run/memory.events"),
    "version 1": ("4:memory:/run", "sys/fs/cgroup/memory/run/memory.oom_control"),
    "version 1, seen from a container": (
        "4:memory:/run",
        "sys/fs/cgroup/memory/memory.oom_control",
    ),
}


def count(root: Path, file: str, number: int) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(f"low 0\noom_kill_disable 0\noom_kill {number}\n")


def set_up(root: Path, groups: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"8:pids:/run\n{groups}\n")
    count(root, "proc/vmstat", 7)


@pytest.mark.parametrize("kind", GROUPS)
def test_the_group_counts_first(kind: str, tmp_path: Path) -> None:
    groups, file = GROUPS[kind]
    set_up(tmp_path, groups)
    count(tmp_path, file, 3)
    kills = MemoryKills(tmp_path)
    assert kills.said() == "sent neither by the launcher nor by the kernel for want of memory"
    count(tmp_path, file, 4)
    count(tmp_path, "proc/vmstat", 9)
    expected = "the kernel has killed 1 process of this run's control group for that"
    assert kills.said() == f"perhaps out of memory: {expected}"


def test_the_machine_counts_where_the_group_does_not(tmp_path: Path) -> None:
    set_up(tmp_path, "0::/run")
    kills = MemoryKills(tmp_path)
    count(tmp_path, "proc/vmstat", 9)
    assert "the kernel has killed 2 processes of this machine for that" in kills.said()


def test_nothing_is_claimed_where_nothing_is_counted(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path).said() == "not sent by the launcher"
