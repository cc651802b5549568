"""The processes behind `Ranks`: pools of ranks, and a process of which ranks are copies."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import shared_server
from roomy import roomy

CALL_SECONDS = 150.0
# Graphs are many small objects that stay: with Python's own 700 a fifth of a capture goes to the collector,
# with 20,000 a tenth of a test, with 100,000 a thirtieth.
COLLECT_AFTER = (400_000, 20, 10)
_ROOT = Path(__file__).parents[2]


class RankFailed(AssertionError):
    """A function raised, or a process ended, on a rank."""


def collect_seldom() -> None:
    """Let the collector run once in many new objects: most of what a test makes lasts as long as the test."""
    gc.set_threshold(*COLLECT_AFTER)


def can_be_copied() -> bool:
    """Whether processes may be forked; a copy of one that has touched CUDA could not use it."""
    return sys.platform == "linux" and not torch.cuda.is_available()


@functools.cache
def context() -> Any:
    """How ranks start."""
    if not can_be_copied():
        return multiprocessing.get_context("spawn")
    shared_server.start()
    return shared_server.Copies()


class Pool:
    """`n` ranks; copies of this process, if it is `copied`."""

    def __init__(self, n: int, timeout_seconds: float = 30.0, *, copied: bool = False) -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes: list[Connection] = []
        self._processes = []
        start = multiprocessing.get_context("fork") if copied else context()
        for rank in range(n):
            here, there = start.Pipe()
            ends = [*self._pipes, here] if copied else []  # a copy has them, too
            process = start.Process(
                target=_serve,
                args=(there, rank, n, self._dir.name, timeout_seconds, ends),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        answers = [self._answer(rank) for rank in range(len(self._pipes))]
        failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            raise RankFailed("\n".join(failed))
        return [result for _, result in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        try:
            if not self._pipes[rank].poll(CALL_SECONDS):
                return False, f"no answer within {CALL_SECONDS:g} s"
            return self._pipes[rank].recv()
        except EOFError:
            return False, "the process ended"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._dir.cleanup()


class Original:
    """A process without ranks, and pools of ranks that are copies of it."""

    def __init__(self, timeout_seconds: float) -> None:
        self._pipe, there = context().Pipe()
        self._process = context().Process(target=_copied, args=(there, timeout_seconds))
        self._process.start()
        there.close()

    def run(self, n: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `Ranks._ask`."""
        try:
            self._pipe.send((n, function.__module__, function.__qualname__, args))
            if not self._pipe.poll(2 * CALL_SECONDS):
                raise RankFailed(f"no answer within {2 * CALL_SECONDS:g} s")
            ok, result = self._pipe.recv()
        except EOFError:
            self.close()
            raise RankFailed("the process ended") from None
        except BaseException:  # a test's timeout: the next call would get this one's answer
            self.close()
            raise
        if not ok:
            raise RankFailed(result)
        return result

    def rest(self) -> None:
        """End the copies."""
        self.run(-1, _close, ())

    @property
    def lives(self) -> bool:
        return not self._pipe.closed

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _copied(pipe: Connection, timeout_seconds: float) -> None:
    """Do what is asked for; a pool of ranks lasts until this process does more that they should have."""
    sys.path.append(str(_ROOT))
    torch.set_num_threads(1)
    collect_seldom()
    known: dict[Any, Any] = {}
    pools: dict[int, Pool] = {}
    while True:
        try:
            n, module, name, args = pipe.recv()
        except EOFError:
            break
        key = module, name, args
        try:
            if n < 0:
                result = _close(pools)
            elif n:
                result = _run_copies(pools, n, _function(module, name), args, timeout_seconds)
            elif key in known:
                result = known[key]
            else:
                _close(pools)
                result = known[key] = roomy(_function(module, name), *args)
            pipe.send((True, result))
        except RankFailed as error:
            _close(pools)
            pipe.send((False, str(error)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    _close(pools)


def _run_copies(
    pools: dict[int, Pool],
    n: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_seconds: float,
) -> list[Any]:
    if n not in pools:
        pools[n] = Pool(n, timeout_seconds, copied=True)
    return pools[n].run(function, args)


def _close(pools: dict[int, Pool]) -> None:
    for pool in pools.values():
        pool.kill()
    pools.clear()


def _function(module: str, name: str) -> Callable[..., Any]:
    if module not in sys.modules:
        __import__(module)
        gc.freeze()  # as in conftest.py
    return getattr(sys.modules[module], name)


def _serve(
    pipe: Connection,
    rank: int,
    n: int,
    run_dir: str,
    timeout_seconds: float,
    others: Sequence[Connection],
) -> None:
    for other in others:
        other.close()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TUTTI_TIMEOUT": str(timeout_seconds),
        "TUTTI_RUN_DIR": run_dir,
    }
    sys.path.append(str(_ROOT))  # test modules are known as tests.comm.test_...
    from tutti.launch.ranks import ensure_process_group

    torch.set_num_threads(1)
    collect_seldom()
    multiprocessing.set_start_method(None, force=True)  # of its children: the system's own
    ensure_process_group()
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, roomy(_function(module, name), *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
