"""Commands whose interpreter is a copy of one that has imported already.

    process = Forked(["-m", "tutti", "run", "-n", "2", "train.py"], env=environment, cwd=root)
    out, err = process.communicate(timeout=60)           # and the rest, as of a `subprocess.Popen`

A fresh interpreter takes 4 to 6 s of processor time until torch, tutti and transformers are imported, which
is most of a short run. These are processes in all else: a pid, a parent, a group, streams, an environment and
signals of their own; and so are the ranks that torch's elastic agent and `Supervisor` start in them, but for
those that are to be `fresh`. test_examples.py, launch/test_causes.py and launch/test_launch.py start fresh
ones and show that these do the same.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from ranks import context
from roomy import roomy


class Forked:
    """What `subprocess.Popen([sys.executable, *words])` is, with pipes for what it prints.

    Args:
        network: the file of a network namespace, in which it begins.
        fresh: the ranks ("0") and roles ("server 0") that it starts as fresh interpreters.
        own_session: whether it leads a session, as what a terminal starts.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: Path,
        network: Path | None = None,
        fresh: Collection[str] = (),
        own_session: bool = False,
    ) -> None:
        ends = [context().Pipe(duplex=False) for _ in range(2)]
        theirs = [there for _, there in ends]
        options = network, frozenset(fresh), own_session
        self._process = context().Process(
            target=_become, args=([str(w) for w in words], dict(env), str(cwd), theirs, *options)
        )
        self._process.start()
        for there in theirs:
            there.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(here.fileno())) for here, _ in ends)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self._process.join()

    def communicate(self, *, timeout: float) -> tuple[str, str]:
        """All that it printed since, once it has ended; it is killed if that takes too long."""
        said = {}
        readers = [
            threading.Thread(target=lambda i=i, s=s: said.update({i: s.read()}), daemon=True)
            for i, s in enumerate((self.stdout, self.stderr))
        ]
        until = time.monotonic() + timeout
        for reader in readers:
            reader.start()
        for waits in (*readers, self._process):
            waits.join(max(0.0, until - time.monotonic()))
        if self._process.exitcode is None or len(said) < 2:
            self.kill()
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return said[0], said[1]


Started = Forked | subprocess.Popen[str]


def started(
    words: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    cwd: Path,
    fresh: bool | Collection[str] = (),
) -> Started:
    """A process with these words: a copy or, with `fresh=True`, an interpreter as users start it.

    Otherwise `fresh` names what it starts so; see `Forked`.
    """
    if fresh is not True:
        return Forked(words, env=env, cwd=cwd, fresh=fresh or ())
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *words], text=True, env=env, cwd=cwd, **pipes)


def run(
    words: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    cwd: Path,
    timeout: float,
    fresh: bool | Collection[str] = (),
) -> Any:
    """What `subprocess.run([sys.executable, *words])` is; see `started`."""
    process = started(words, env=env, cwd=cwd, fresh=fresh)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()  # it has ended, but for a timeout
    return subprocess.CompletedProcess(words, process.returncode or 0, out, err)


def _become(
    words: list[str],
    env: dict[str, str],
    cwd: str,
    streams: list[Connection],
    network: Path | None,
    fresh: Collection[str],
    own_session: bool,
) -> None:
    """In a copy of the process that has imported: be an interpreter that was given these words."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from tutti.environment import ROLE
    from tutti.launch.supervise import Supervisor

    if own_session:
        os.setsid()
    os.chdir(cwd)
    if network is not None:
        with network.open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {network}")
    start, spawn = SubprocessHandler._popen, Supervisor.spawn

    def started_rank(handler: Any, args: Any, env: dict[str, str]) -> Any:
        if env["RANK"] in fresh:
            return start(handler, args, env)
        return _Child(lambda: interpret(args[1:], env, [handler._stdout, handler._stderr]))

    def started_role(supervisor: Any, environment: dict[str, str], log: Path | None) -> Any:
        chosen = spawn if environment[ROLE.name] in fresh else _spawned
        return chosen(supervisor, environment, log)

    SubprocessHandler._popen = started_rank  # type: ignore[method-assign]
    Supervisor.spawn = started_role  # type: ignore[method-assign]
    interpret(words, env, streams)


def _spawned(supervisor: Any, environment: dict[str, str], log: Path | None) -> _Child:
    """As `Supervisor.spawn`."""
    words = ["-m", "tutti.launch.worker", *supervisor.command]
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(log, "ab")) if log is not None else None
        nothing = stack.enter_context(open(os.devnull, "rb"))

        def becomes() -> NoReturn:
            os.dup2(nothing.fileno(), 0)
            interpret(words, environment, [out, out])

        return _Child(becomes, own_session=False)


class _Child:
    """A forked process that a launcher takes for a `subprocess.Popen`."""

    def __init__(self, becomes: Callable[[], NoReturn], *, own_session: bool = True) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            if own_session:
                os.setsid()
            atexit._clear()  # the launcher's
            util._finalizer_registry.clear()
            atexit.register(util._exit_function)
            becomes()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            time.sleep(0.01)
        return code


def interpret(words: Sequence[str], env: dict[str, str], streams: Sequence[Any]) -> NoReturn:
    """Play the words, without signal handlers and streams of the process that was copied."""
    import torch

    tempfile.tempdir = None  # found again, from TMPDIR
    multiprocessing.set_start_method(None, force=True)  # of its children: the system's own
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    for fd, stream in zip((1, 2), streams, strict=True):
        if stream is not None:
            os.dup2(stream.fileno(), fd)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    code = roomy(_played, [word for word in words if word != "-u"])
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _played(words: list[str]) -> int:
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
