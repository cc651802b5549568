"""One fork server for a whole run of pytest, whose workers are copies of it, too.

A worker imports torch, tutti and transformers, and so would a server of its ranks: 6 s of processor time
each. The process that runs pytest starts one server, before its own imports. Each worker starts as

    python copied_worker.py -u -c CODE

which asks the server for a copy with its own streams and environment, and ends when that copy does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

_ADDRESS = "FORK_SERVER_OF_TESTS"  # its name begins with a zero byte, which no variable can hold


def start() -> None:
    """Start a server that forks processes for this one and for its workers, unless there is one."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_address is not None:
        return
    forkserver.set_forkserver_preload(["imported_once"])
    # The server of Python 3.11 looks for it on its own path alone.
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths}):
        forkserver.ensure_running()
    os.environ[_ADDRESS] = server._forkserver_address.replace("\0", "@")


def start_early() -> None:
    """As `start`, in the process that runs pytest with several workers, if no device could forbid copies."""
    can_be_copied = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
    has_workers = any(word.startswith(("-n", "--numprocesses")) for word in sys.argv)
    if can_be_copied and has_workers and "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # a copy of a process with threads would wait for them
        start()


def worker_command() -> str | None:
    """What starts a worker as a copy of the server; None where none has been started."""
    if _ADDRESS not in os.environ:
        return None
    return f"'{sys.executable}' '{Path(__file__).with_name('copied_worker.py')}'"


class _Stream:
    """A descriptor of this process, which a copy of the server gets when it starts."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.fd),)


def _received(sent: Any) -> _Stream:
    return _Stream(sent.detach())


class _Copy(ForkServerProcess):
    """What it prints goes where this process prints, not where the server did."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._streams = _Stream(1), _Stream(2)

    def run(self) -> None:
        for fd, stream in enumerate(self._streams, 1):
            os.dup2(stream.fd, fd)
            os.close(stream.fd)
        super().run()


class Copies(ForkServerContext):
    """A context of `multiprocessing` whose processes are copies of the server."""

    Process = _Copy  # type: ignore[assignment]


def be_copied(words: Sequence[str]) -> int:
    """Let a copy of the server be `python WORDS`, with the streams of this process; its exit code."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = os.environ[_ADDRESS].replace("@", "\0")
    # A copy gets it; the server itself watches the one of the process that started it.
    server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    server.ensure_running = resource_tracker.ensure_running
    process = Copies().Process(target=_become, args=(list(words), dict(os.environ), _Stream(0)))
    process.start()
    process.join()
    return process.exitcode or 0


def _become(words: list[str], env: dict[str, str], given: _Stream) -> None:
    from forked import interpret

    # A process that the server has forked takes it for its own, but would look for it among its children.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]
    os.dup2(given.fd, 0)
    sys.stdin = os.fdopen(0, closefd=False)
    interpret(words, env, [None, None])
