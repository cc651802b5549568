"""This process as one rank of a run: the default process group and its device."""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.collectives.group import collective_timeout
from tutti.comm.host.bounded_call import bounded
from tutti.environment import RUN_DIR, check_seconds
from tutti.errors import TuttiError
from tutti.launch.gathering import Gathering, here
from tutti.launch.not_met import no_answer, not_met
from tutti.launch.waits import watch_waits

LEAVE_SECONDS = 0.1
# Beyond `TUTTI_TIMEOUT`, after which PyTorch itself reports a store that it does not reach.
_MORE_SECONDS = 2.0
# Whether the script has asked for its ranks: from then on it may train.
asked = threading.Event()


def ensure_process_group() -> bool:
    """Join the run of `tutti run` or `torchrun`, if there is one and this process has not joined.

    Gloo on CPU; NCCL for CUDA tensors. Collectives wait `TUTTI_TIMEOUT` seconds at most. Returns whether
    this process is one rank of several.

    Raises:
        CommError: a rank does not come within `TUTTI_TIMEOUT`, or ranks cannot connect.
    """
    asked.set()
    check_seconds()
    if dist.is_initialized():
        return dist.get_world_size() > 1
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or not dist.is_available():
        return False
    group, rank = divmod(int(os.environ["RANK"]), world_size)
    watch_waits()
    _meet(group, rank, world_size)
    atexit.register(leave)
    return True


def _meet(group: int, rank: int, world_size: int) -> None:
    """Join the process group; each rank notes in the store that it is here."""
    store = None
    try:
        store = _rendezvous(group, rank, world_size)
        store.set(here(rank), "")
        if run_dir := RUN_DIR.read():
            gathering = Gathering(
                store, Path(run_dir), rank, first=group * world_size, size=world_size
            )
            gathering.wait()
        words = {"store": store, "rank": rank, "world_size": world_size}
        dist.init_process_group(_backend(), timeout=collective_timeout(), **words)
    except RuntimeError as error:
        missing = [] if store is None else _missing(store, world_size)
        raise not_met(error, rank, missing) from error


def _missing(store: Any, world_size: int) -> list[int]:
    """The ranks that have not come to the store; none if it no longer answers."""
    try:
        return [rank for rank in range(world_size) if not store.check([here(rank)])]
    except RuntimeError:
        return []


def _backend() -> str:
    """NCCL on every host with a GPU, whether or not a model lies there: all ranks name the same backends."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return "gloo"
    choose_gpu()
    return "cpu:gloo,cuda:nccl"


def choose_gpu() -> None:
    """Make the GPU `LOCAL_RANK` this process's own: "cuda" means it from then on.

    A process to which one GPU is visible keeps that one.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank < torch.cuda.device_count() and torch.cuda.current_device() == 0:
        torch.cuda.set_device(local_rank)


def _rendezvous(group: int, rank: int, world_size: int) -> Any:
    """The store of the run: of `tutti run`, a file of the run's own directory, without a listening socket.

    With servers each worker's ranks are a separate group, and never meet those of another.

    torchrun keeps one store over its restarts, with the addresses of ranks that have ended. On one host the
    number of restarts tells them apart; agents of several hosts count them differently.

    Raises:
        TuttiError: there is no such directory, or this process cannot write there.
    """
    run_dir = RUN_DIR.read()
    if not run_dir:
        store = _store_of_environment(rank, world_size)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        one_host = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        part = f"tutti/{attempt if one_host else ''}"
        return dist.PrefixStore(part, store)  # pyright: ignore[reportPrivateImportUsage]
    if not (os.path.isdir(run_dir) and os.access(run_dir, os.W_OK | os.X_OK)):
        raise TuttiError(
            f"{RUN_DIR.name}={run_dir} is no directory for this rank to write in",
            why="ranks meet in a file there; tutti run makes the directory, and sets this for its ranks",
            fix=f"unset {RUN_DIR.name}: the ranks of torchrun meet as torchrun says",
        )
    path = os.path.join(run_dir, f"ranks{group or ''}.store")
    return dist.FileStore(path, world_size)  # pyright: ignore[reportPrivateImportUsage]


def _store_of_environment(rank: int, world_size: int) -> Any:
    """The store at `MASTER_ADDR` and `MASTER_PORT`, within `TUTTI_TIMEOUT`.

    PyTorch's own limit ends once something there has accepted the connection, even if that never answers.
    """
    limit = collective_timeout()
    found = dist.rendezvous("env://", rank, world_size, timeout=limit)  # pyright: ignore[reportPrivateImportUsage]
    try:
        store, _, _ = bounded(
            lambda: next(found), limit.total_seconds() + _MORE_SECONDS, "tutti-store"
        )
    except TimeoutError:
        raise no_answer(rank, limit.total_seconds()) from None
    store.set_timeout(limit)
    return store


def leave() -> None:
    """Destroy the process groups; runs at exit.

    A Gloo thread that still holds a finished collective's tensors when the interpreter shuts down
    aborts the process ("terminate called without an active exception"): it gets time to release them.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(LEAVE_SECONDS)
