"""Ways in which collectives travel, to run the same cases over each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from tutti.comm.collectives import groups as groups_module
from tutti.comm.host.segment import memory_host
from tutti.environment import SHARED_MEMORY

GLOO, SHARED, TWO_LEVELS = "gloo", "shared", "two levels"
WAYS = (GLOO, SHARED, TWO_LEVELS)


@contextmanager
def by(way: str) -> Iterator[None]:
    """On a rank: groups made here use this way; on two levels the first half of the ranks is a host."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    level = f"/{rank // half}" if way == TWO_LEVELS else ""
    setting = {SHARED_MEMORY.name: "off"} if way == GLOO else {}
    with (
        mock.patch.dict(os.environ, setting),
        mock.patch.object(groups_module, "memory_host", lambda rank: memory_host(rank) + level),
    ):
        yield
