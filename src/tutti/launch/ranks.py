"""This process as one rank of a run: the default process group and its device."""

from __future__ import annotations

import atexit
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.collectives.group import collective_timeout
from tutti.environment import RUN_DIR, check_seconds
from tutti.errors import TuttiError
from tutti.launch.waits import watch_waits

LEAVE_SECONDS = 0.1


def ensure_process_group() -> bool:
    """Join the run of `tutti run` or `torchrun`, if there is one and this process has not joined.

    Gloo on CPU; NCCL for CUDA tensors. Collectives wait `TUTTI_TIMEOUT` seconds at most. Returns whether
    this process is one rank of several.
    """
    check_seconds()
    if dist.is_initialized():
        return dist.get_world_size() > 1
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or not dist.is_available():
        return False
    group, rank = divmod(int(os.environ["RANK"]), world_size)
    where = _rendezvous(group, rank, world_size)
    watch_waits()
    dist.init_process_group(_backend(), timeout=collective_timeout(), **where)
    atexit.register(leave)
    return True


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


def _rendezvous(group: int, rank: int, world_size: int) -> dict[str, Any]:
    """Ranks of `tutti run` meet in a file of the run's own directory, without a listening socket.

    With servers each worker's ranks are a separate group, and never meet those of another.

    Raises:
        TuttiError: there is no such directory, or this process cannot write there.
    """
    run_dir = RUN_DIR.read()
    if not run_dir:
        return {"init_method": "env://"}
    if not (os.path.isdir(run_dir) and os.access(run_dir, os.W_OK | os.X_OK)):
        raise TuttiError(
            f"{RUN_DIR.name}={run_dir} is no directory for this rank to write in",
            why="ranks meet in a file there; tutti run makes the directory, and sets this for its ranks",
            fix=f"unset {RUN_DIR.name}: the ranks of torchrun meet as torchrun says",
        )
    path = os.path.join(run_dir, f"ranks{group or ''}.store")
    store = dist.FileStore(path, world_size)  # pyright: ignore[reportPrivateImportUsage]
    return {"store": store, "rank": rank, "world_size": world_size}


def leave() -> None:
    """Destroy the process groups; runs at exit.

    A Gloo thread that still holds a finished collective's tensors when the interpreter shuts down
    aborts the process ("terminate called without an active exception"): it gets time to release them.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(LEAVE_SECONDS)
