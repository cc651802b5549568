"""Ranks agree outside of steps: errors name the rank that does not come."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ranks import Ranks
from tutti.comm.collectives.exchange import broadcast_first, exchange_texts
from tutti.comm.collectives.group import Group
from tutti.errors import CommError


def texts(group: Group) -> None:
    exchange_texts("a text", group, "the start of an epoch")


def state(_group: Group) -> None:
    broadcast_first(torch.ones(2, dtype=torch.float64))


def late(act: Callable[[Group], None], absent: int) -> str:
    """The error of the rank that waits for rank `absent`, which does nothing."""
    handle = dist.new_group(timeout=timedelta(seconds=1))
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if dist.get_rank() == absent:
        return ""
    group = Group.of(handle, (0, 1), dist.get_rank())
    with pytest.raises(CommError) as caught:
        act(group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("act", "absent", "what"),
    [(texts, 1, "the start of an epoch"), (state, 0, "the broadcast of rank 0's state")],
)
def test_a_late_rank_is_named(
    ranks: Ranks, act: Callable[[Group], None], absent: int, what: str
) -> None:
    said = ranks.run(late, act, absent, n=2)[1 - absent]
    assert said.startswith(f"rank {absent} did not join rank {1 - absent} in {what} within ")
