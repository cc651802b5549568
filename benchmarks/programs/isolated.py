"""Functions in processes of their own: neither a crash nor a hang of them stops who asked.

for part in Isolated(function, args).answers(seconds=60): ...       # what it yields, then how it ended
for parts in Ranks(function, args, n=2).answers(seconds=60): ...    # a list, one entry for each rank
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from multiprocessing.connection import Connection
from typing import Any

# What every program needs is imported once, in the process of which all others are copies.
IMPORTED_ONCE = [
    "torch",
    "tutti.api",
    "tutti.launch.ranks",
    "tutti.verification.verdict",
    "transformers",
]
RANK_SECONDS = "20"  # how long a collective waits for its peers


@dataclass(frozen=True)
class Ended:
    """A process that gave no further answer: a timeout, or an exit without a word."""

    why: str


class Isolated:
    """The generator `function(*args)` in a process of its own; `named` goes into its environment."""

    def __init__(
        self, function: Callable[..., Iterator[Any]], args: tuple[Any, ...], named: Any = None
    ) -> None:
        self._pipe, there = _context().Pipe()
        self._process = _context().Process(
            target=_answer, args=(there, function, args, dict(named or {})), daemon=True
        )
        self._process.start()
        there.close()

    def next(self, seconds: float) -> tuple[bool, Any]:
        """Whether it is over, and what it yielded; `Ended` where it broke off."""
        try:
            if not self._pipe.poll(seconds):
                return True, Ended(f"no answer within {seconds:.0f} s")
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(5)
            return True, Ended(f"the process ended with {self._process.exitcode}")

    def answers(self, seconds: float, *own: float) -> Iterator[Any]:
        """All that it yields, each within `seconds`, the first ones within their `own`; `Ended` at last where
        it breaks off."""
        over, limits = False, chain(own, repeat(seconds))
        try:
            while not over:
                over, value = self.next(next(limits))
                if not over or value is not None:
                    yield value
        finally:
            self.close()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(0.2)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


class Ranks:
    """The generator `function(*args)` on `n` ranks with a default process group."""

    def __init__(
        self, function: Callable[..., Iterator[Any]], args: tuple[Any, ...], *, n: int
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="programs-")
        named = {
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",  # as a launcher says; libraries ask for it
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": "lo",
            "TUTTI_TIMEOUT": RANK_SECONDS,
            "TUTTI_RUN_DIR": self._folder.name,
        }
        self._ranks = [
            Isolated(function, args, named | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(n)
        ]

    def answers(self, seconds: float) -> Iterator[list[Any]]:
        """What all ranks yield, side by side; ends after a list with an `Ended`."""
        try:
            while True:
                end = time.monotonic() + seconds
                found = [r.next(max(0.1, end - time.monotonic())) for r in self._ranks]
                if all(over and value is None for over, value in found):
                    return
                yield [Ended("over before its peer") if x is None else x for _, x in found]
                if any(over for over, _ in found):
                    return
        finally:
            for rank in self._ranks:
                rank.close()
            self._folder.cleanup()


@functools.cache
def _context() -> Any:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(IMPORTED_ONCE)
    return made


def _answer(
    pipe: Connection, function: Callable[..., Iterator[Any]], args: Any, named: dict[str, str]
) -> None:
    """One thread; the process group of a rank is made before its first answer."""
    import torch

    os.environ |= {"OMP_NUM_THREADS": "1"} | named
    torch.set_num_threads(1)
    gc.set_threshold(20_000)
    if "RANK" in named:
        from tutti.launch.ranks import ensure_process_group

        ensure_process_group()
    with contextlib.suppress(BrokenPipeError):  # who asked has heard enough
        for value in function(*args):
            pipe.send((False, value))
        pipe.send((True, None))
    if "RANK" in named:
        time.sleep(5)  # a peer may still want to hear from this rank; who asked ends both
