"""Contracts of `torch_private/named_group.py`."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ranks import Ranks
from tutti.torch_private.named_group import named_group


def _sums() -> list[float]:
    """The sums over one group after the other; rank 1 is in more of them than rank 0."""
    rank, found = dist.get_rank(), []
    pairs = [[1, 2], [0, 1], [0, 1, 2]]
    for pair in pairs:
        if rank in pair:
            group = named_group(pair, f"a test {pair}", timedelta(seconds=30))
            x = torch.tensor(float(rank))
            dist.all_reduce(x, group=group)
            assert dist.get_process_group_ranks(group) == pair
            found.append(x.item())
            dist.destroy_process_group(group)
    return found


def test_ranks_meet_by_name_whatever_other_groups_they_are_in(ranks: Ranks) -> None:
    assert ranks.run(_sums, n=3) == [[1.0, 3.0], [3.0, 1.0, 3.0], [3.0, 3.0]]
