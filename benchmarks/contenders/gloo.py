"""The process group of the torch peers."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.contenders import eager
from benchmarks.contenders.contender import Place
from tutti.environment import RUN_DIR


def prepare(place: Place) -> None:
    """Join the other ranks on Gloo; they meet in a file of the run's directory, so nothing listens."""
    eager.prepare(place)
    path = os.path.join(RUN_DIR.read(), "peers.store")
    store = dist.FileStore(path, place.num_ranks)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.num_ranks)
    dist.all_reduce(torch.ones(1))


def mesh(place: Place) -> DeviceMesh:
    """All ranks in a line."""
    return init_device_mesh("cpu", (place.num_ranks,))
