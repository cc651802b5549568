"""Some ranks make a group later: in limited time, whatever the others do."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch.distributed as dist

from ranks import Ranks
from tutti.comm.collectives import fresh_group as module
from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.fresh_group import fresh_group
from tutti.errors import CommError


def pairs() -> list[list[str]]:
    """Two pairs make groups at once, each a second one, then all ranks one."""
    rank, mine = dist.get_rank(), [0, 1] if dist.get_rank() < 2 else [2, 3]
    made = [fresh_group(ranks) for ranks in (mine, mine, [0, 1, 2, 3], [rank])]
    return [exchange_texts(str(rank), group) for group in made[:3]] + [[str(made[3].size)]]


def test_groups_of_other_ranks_are_made_at_the_same_time(ranks: Ranks) -> None:
    every = ["0", "1", "2", "3"]
    found = ranks.run(pairs, n=4)
    assert found == [[pair, pair, every, ["1"]] for pair in [["0", "1"]] * 2 + [["2", "3"]] * 2]


def without_rank_1() -> tuple[str, float]:
    if dist.get_rank():
        return "", 0.0
    return _said()


def without_a_store() -> tuple[str, float]:
    """Nothing answers, as of a host that the network does not reach."""
    with mock.patch.object(module, "named_group", lambda *_: time.sleep(60)):
        return _said()


def _said() -> tuple[str, float]:
    begin = time.monotonic()
    with mock.patch.dict(os.environ, {"TUTTI_TIMEOUT": "1"}), pytest.raises(CommError) as caught:
        fresh_group([0, 1])
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("situation", "why"),
    [(without_rank_1, "imeout"), (without_a_store, "the store of the run does not answer")],
)
def test_it_takes_no_longer_than_a_collective(ranks: Ranks, situation, why: str) -> None:
    said, seconds = ranks.run(situation, n=2)[0]
    assert said.startswith("rank 0 has made no group with rank 1 within 1 s") and why in said
    assert seconds < 10
