"""Runs with servers whose processes are forked: what they wrote, and the same script on one device."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import served_script
from launch.processes import lives
from ranks import context
from tutti.launch import worker
from tutti.launch.roles import roles_of
from tutti.launch.supervise import Supervisor
from tutti.layout import Layout

SCRIPT = Path(served_script.__file__)
WAIT_SECONDS = 120.0


def as_rank(words: list[str], environment: dict[str, str], log: str) -> None:
    """In a forked process: what `python -m tutti.launch.worker` does."""
    os.environ.clear()
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    sys.argv = ["worker", *words]
    worker.main()


class Forked:
    """A process that need not import torch for itself, looking like a `subprocess.Popen`."""

    def __init__(self, words: list[str], environment: dict[str, str], log: Path) -> None:
        self.process = context().Process(target=as_rank, args=(words, environment, str(log)))
        self.process.start()

    @property
    def returncode(self) -> int:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


class Run(Supervisor):
    """A run whose processes are forked; `play` says what happens meanwhile."""

    def spawn(self, environment: dict[str, str], log: Path | None) -> Any:
        return Forked(self.command, environment, log or self.log_dir / "first.log")


def played(
    directory: Path,
    text: str,
    play: Callable[[Path], None] | None = None,
    *,
    steps: int = 4,
    wrong: str = "nobody",
    **environment: str,
) -> tuple[int, str]:
    """The exit code of a run, and all that its processes wrote."""
    layout = Layout.parse(text)
    words = [str(SCRIPT), str(directory), str(steps), wrong]
    environment = {"TUTTI_TIMEOUT": "60", "OMP_NUM_THREADS": "1"} | environment
    made = Run(layout, roles_of(layout), words, environment=environment, log_dir=directory / "logs")
    if play is not None:
        Thread(target=play, args=(directory,), daemon=True).start()
    code = made.run()
    return code, "".join(p.read_text() for p in sorted((directory / "logs").iterdir()))


def lines(directory: Path, who: str, kind: str) -> list[list[float]]:
    """The numbers in the lines of a kind that a process has written."""
    path = directory / f"{who}.txt"
    found = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [[float(x) for x in line[1:]] for line in found if line[0] == kind]


def wait_for(directory: Path, who: str, steps: int) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while len(lines(directory, who, "step")) < steps:
        assert time.monotonic() < until, f"{who} does not get on"
        time.sleep(0.02)


def process_of(directory: Path, who: str) -> int:
    return int(lines(directory, who, "pid")[-1][0])


def kill(directory: Path, who: str) -> None:
    os.kill(process_of(directory, who), signal.SIGKILL)


def wait_for_end(directory: Path, who: str) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while lives(process_of(directory, who)):
        assert time.monotonic() < until, f"{who} does not end"
        time.sleep(0.02)


def pause(directory: Path, who: str, seconds: float) -> None:
    pid = process_of(directory, who)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def of_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be one device."""
    monkeypatch.delenv("TUTTI_LAYOUT", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def on_one_device(directory: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what the script writes on one device."""
    of_no_run(monkeypatch)
    alone = directory / "alone"
    alone.mkdir()
    served_script.main(alone, steps, "nobody")
    return alone
