"""One process of a contender: does what the harness asks over a pipe, and waits between.

| asked | answered |
| --- | --- |
| `("build",)` | seconds |
| `("steps", count)` | `Steps` |
| `("call", function, args)` | `function(contender, *args)` |

The answer to anything that fails is the exception's text.
"""

from __future__ import annotations

import atexit
import os
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.contenders.contender import Contender, Missing, Place, Way
from benchmarks.models import Case


@dataclass(frozen=True)
class Steps:
    """What steps took, in seconds, and their losses on this rank."""

    seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Failed:
    """Why a process cannot go on; `is_missing` if a package is not installed."""

    text: str
    is_missing: bool = False


def serve(pipe: Connection, case: Case, way: Way, rank: int, run_dir: str) -> None:
    """Answer until the pipe is closed. Runs in a process of its own."""
    _settle_down(way, rank, run_dir)
    place = Place(rank, way.num_ranks)
    contender: Any = None
    pipe.send(_answer(lambda: _prepare(case, way, place)))
    while True:
        try:
            word, *rest = pipe.recv()
        except (EOFError, ConnectionError):
            break
        if word == "build":
            began = time.perf_counter()
            contender = _answer(lambda: way.build(case, place))
            failed = isinstance(contender, Failed)
            pipe.send(contender if failed else time.perf_counter() - began)
        elif word == "steps":
            pipe.send(_answer(lambda: steps(contender, *rest)))  # noqa: B023 (called at once)
        else:
            function, args = rest
            pipe.send(_answer(lambda: function(contender, *args)))  # noqa: B023
    atexit._run_exitfuncs()
    os._exit(0)  # without Python's last act, in which Gloo's threads may abort


def steps(contender: Contender, count: int) -> Steps:
    """`count` steps, each timed from call to return."""
    seconds, losses = [], []
    for _ in range(count):
        began = time.perf_counter()
        losses.append(contender.step())
        seconds.append(time.perf_counter() - began)
    return Steps(seconds, losses)


def _settle_down(way: Way, rank: int, run_dir: str) -> None:
    """One thread, the cores that the way may use, and the names by which ranks find each other."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(way.num_ranks),
        "TUTTI_RUN_DIR": run_dir,
    }
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: way.num_cores])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _prepare(case: Case, way: Way, place: Place) -> None:
    with torch.device("meta"):
        case.make()  # imports what the model needs, and takes no memory
    way.prepare(place)


def _answer(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Missing as error:
        return Failed(str(error), is_missing=True)
    except BaseException:
        return Failed(traceback.format_exc())
