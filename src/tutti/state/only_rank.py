"""Checks the one rank that has whole weights: a number that no rank has would lose them in silence."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from tutti.argument_types import whole_number
from tutti.errors import LayoutError
from tutti.state.residence import Residence

_FIX = "rank=0, or none given: on all"


def checked_rank(rank: Any, homes: Iterable[Residence]) -> int | None:
    """`rank` as an integer; None for all ranks.

    Raises:
        LayoutError: it is no number of a rank of the layouts of `homes`; without any, of this run.
    """
    if rank is None:
        return None
    found = whole_number("rank", rank, fix=_FIX, error=LayoutError)
    sizes = {home.layout.num_ranks: f'layout "{home.layout}"' for home in homes}
    for size, of in (sizes or {_world_size(): "the run"}).items():
        if not 0 <= found < size:
            raise LayoutError(
                f"there is no rank {found} to have the weights whole",
                why=f"{of} has {size} ranks" if size > 1 else "there is one device, rank 0",
                fix=_FIX,
            )
    return found


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
