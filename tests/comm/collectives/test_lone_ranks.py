"""Ranks that are killed, stopped, late, or without memory: the others say so, or go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from ranks import context
from tests.comm.collectives.lone_ranks import main

ACTIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
RAISE_SECONDS = 20.0  # well before the time-out; it takes 0.3 s on an idle machine
APART_SECONDS = 30.0
SHM = Path("/dev/shm")


class Lone:
    """Processes of `lone_ranks.main`, one a rank."""

    def __init__(self, directory: Path, n: int, action: str, *args: str, **more: str):
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        settings = {
            "WORLD_SIZE": str(n),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TUTTI_RUN_DIR": str(directory),
            "TUTTI_TIMEOUT": "600",
        }
        self._args = (settings | more, action, *args)

    def start(self) -> None:
        """Start the next rank."""
        settings, *args = self._args
        here, there = context().Pipe(duplex=False)
        rank = {"RANK": str(len(self.processes))}
        process = context().Process(target=main, args=(there, settings | rank, *args), daemon=True)
        process.start()
        there.close()
        self.processes.append(process)
        self._pipes.append(here)

    def line(self, rank: int, seconds: float = 200.0) -> str:
        """The next line that a rank says; how it ended if there is none."""
        if not self._pipes[rank].poll(seconds):
            return f"nothing within {seconds:g} s"
        try:
            return self._pipes[rank].recv()
        except EOFError:
            self.processes[rank].join()
            return f"ended with exit code {self.processes[rank].exitcode}"

    def lines(self, seconds: float = 200.0) -> list[str]:
        return [self.line(rank, seconds) for rank in range(len(self.processes))]

    def send(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)


@contextmanager
def lone(directory: Path, n: int, *args: str, num_at_once: int = 0, **more: str) -> Iterator[Lone]:
    """The ranks, by default all started; killed at the end, whatever they do."""
    ranks = Lone(directory, n, *args, **more)
    try:
        for _ in range(num_at_once or n):
            ranks.start()
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module", autouse=True)
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Lone]]:
    """Two ranks, the first of which waits since this module's tests began; a call starts the other."""
    with lone(tmp_path_factory.mktemp("apart"), 2, "once", num_at_once=1) as ranks:
        began = time.monotonic()

        def both() -> Lone:
            time.sleep(max(0.0, APART_SECONDS - (time.monotonic() - began)))
            ranks.start()
            return ranks

        yield both


@pytest.mark.parametrize("action", [*ACTIONS, "all_reduce_", "send", "recv"])
def test_a_killed_rank_is_named(action: str, tmp_path: Path) -> None:
    with lone(tmp_path, 3, action, "inf") as ranks:
        assert ranks.lines() == ["ready"] * 3
        time.sleep(0.3)
        ranks.send(2, signal.SIGKILL)
        # In a channel only rank 0 deals with the victim.
        waiting = (0,) if action in ("send", "recv") else (0, 1)
        began = time.monotonic()
        said = [ranks.line(rank) for rank in waiting]
        assert time.monotonic() - began < RAISE_SECONDS
    for rank, text in zip(waiting, said, strict=True):
        assert text.startswith(f"CommError: rank 2 is gone; it left rank {rank} in {action}"), text


def test_a_stopped_rank_is_named_after_the_timeout(tmp_path: Path) -> None:
    with lone(tmp_path, 2, "all_reduce", "inf", TIMEOUT_ONCE_STARTED="3") as ranks:
        assert ranks.lines() == ["ready"] * 2
        ranks.send(1, signal.SIGSTOP)
        said, pid = ranks.line(0), ranks.processes[1].pid
    assert said.startswith("CommError: rank 1 did not join rank 0 in all_reduce over data"), said
    assert "within 3 s" in said and f"(process {pid} is stopped)" in said


def test_a_rank_that_is_stopped_for_a_while_does_no_harm(tmp_path: Path) -> None:
    with lone(tmp_path, 2, "all_reduce", "4") as ranks:
        assert ranks.lines() == ["ready"] * 2
        ranks.send(1, signal.SIGSTOP)
        time.sleep(2)
        ranks.send(1, signal.SIGCONT)
        assert ranks.lines() == ["ok"] * 2


@contextmanager
def tiny_filesystem(directory: Path, nbytes: int) -> Iterator[Path]:
    """A tmpfs of this size; skips where this process may not mount one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs of its own: {mounted.stderr.strip()}")
    fd = os.open(directory, os.O_RDONLY)
    # It has no place any more, and goes when nobody holds it open: also when this process is killed.
    subprocess.run(["umount", "--lazy", str(directory)], check=True)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


def check_fallback(directory: Path, where: Path, reason: str) -> None:
    with lone(directory, 4, "once", TUTTI_SHARED_MEMORY=str(where)) as ranks:
        said = ranks.lines()
    assert all(line.startswith("ok shared={False}") for line in said), said
    assert [re.findall(r"warnings=(\d)", line) for line in said] == [["1"], ["0"], ["0"], ["0"]]
    assert "share no memory" in said[0] and reason in said[0]


def test_a_full_filesystem_leaves_it_to_gloo_and_says_so_once(tmp_path: Path) -> None:
    where = tmp_path / "tiny"
    where.mkdir()
    with tiny_filesystem(where, 2**20) as where:
        check_fallback(tmp_path, where, f"{where} has no room for 6.3 MB")


def test_a_missing_directory_leaves_it_to_gloo_and_says_so_once(tmp_path: Path) -> None:
    where = tmp_path / "missing"
    check_fallback(tmp_path, where, f"{where}: No such file or directory")


def test_one_rank_may_switch_it_off_for_all(tmp_path: Path) -> None:
    """The setting of one host must not leave the others waiting."""
    with lone(tmp_path, 2, "once") as ranks:
        assert all(line.startswith("ok shared={True}") for line in ranks.lines())
    tmp_path = tmp_path / "again"
    tmp_path.mkdir()
    with lone(tmp_path, 2, "once", TUTTI_SHARED_MEMORY="off") as ranks:
        assert all(line == "ok shared={False} warnings=0" for line in ranks.lines())


def test_an_arena_that_does_not_fit_leaves_the_group_as_it_was(tmp_path: Path) -> None:
    where = tmp_path / "tiny"
    where.mkdir()
    with tiny_filesystem(where, 2**24) as where:
        free = os.statvfs(where).f_bfree
        with lone(tmp_path, 3, "large_arena", str(2**24), TUTTI_SHARED_MEMORY=str(where)) as ranks:
            wanted = f"ok {where} has no room for {3 * 2**24 / 1e6:.1f} MB"
            assert ranks.lines() == [wanted] * 3
        assert os.statvfs(where).f_bfree == free


def test_nothing_is_left_when_all_ranks_are_killed(tmp_path: Path) -> None:
    """A file without a name goes with the last process that has it open."""
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        with lone(tmp_path, 3, "segments", TUTTI_SHARED_MEMORY=name) as ranks:
            assert ranks.lines() == ["ready 600:0"] * 3, "mode 0600, and no name"
            assert os.listdir(name) == []
            for rank in range(3):
                ranks.send(rank, signal.SIGKILL)
            for process in ranks.processes:
                process.join()
        assert os.listdir(name) == []


def test_ranks_that_start_half_a_minute_apart(apart: Callable[[], Lone]) -> None:
    """The last here: the first of them waits while the other tests run."""
    assert all(line.startswith("ok shared={True} warnings=0") for line in apart().lines())
