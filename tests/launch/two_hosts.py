"""What two hosts of two ranks compute as one host of four: each collective over a 2-D mesh."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tutti.comm.collectives.agree import check_order
from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.launch.ranks import ensure_process_group

BOTH = ("data", "tensor")


def total() -> float:
    """The result of a fixed program, on four ranks; it depends on every rank's input."""
    ensure_process_group()
    player = ProcessGroups(Groups({"data": 2, "tensor": 2}, [("data",), ("tensor",), BOTH]))
    check_order(["the", "same", "everywhere"])
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(16, 16, dtype=torch.float64, generator=generator)
    for _ in range(3):
        x = player.reduce_scatter(x, ("data",), 0, 1, "sum")
        x = player.all_gather(x, ("tensor",), 0, 1)
        x = player.all_to_all(x, BOTH, 1, 1, 0, 1)[:16].repeat(1, 4)
        x = x / player.all_reduce(x.abs(), BOTH, "max")
    return player.all_reduce(x.sum(), BOTH, "sum").item()
