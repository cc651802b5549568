"""All ranks read the same votes, a round after they were given, however far apart they are."""

from __future__ import annotations

import os
import random
import time
from unittest import mock

import pytest
import torch.distributed as dist

from ranks import Ranks
from tutti.comm.collectives.group import Group
from tutti.comm.collectives.votes import NamedVotes, SentVotes, SharedVotes, votes_of
from tutti.errors import CommError

ROUNDS = 200


def vote_of(rank: int, k: int) -> int:
    return 1 << rank if random.Random(1000 * k + rank).random() < 0.1 else 0


def rounds(shared: str) -> tuple[str, list[int]]:
    """The kind of votes, and the unions that this rank reads."""
    with mock.patch.dict(os.environ, {"TUTTI_SHARED_MEMORY": shared}):
        votes = votes_of(Group.world(), "tick")
    found, chance = [], random.Random(dist.get_rank())
    for k in range(ROUNDS):
        if chance.random() < 0.1:
            time.sleep(0.002)
        found.append(votes.take())
        votes.give(vote_of(dist.get_rank(), k))
    found.append(votes.take())
    return "SharedVotes" if votes.shared else "SentVotes", found


@pytest.mark.parametrize("kind", [SharedVotes, SentVotes])
def test_all_ranks_read_the_union_of_the_last_round(ranks: Ranks, kind: type) -> None:
    shared = "/dev/shm" if kind is SharedVotes else "off"
    unions = [0] + [sum(vote_of(rank, k) for rank in range(4)) for k in range(ROUNDS)]
    assert len({*unions}) > 4
    assert ranks.run(rounds, shared, n=4) == [(kind.__name__, unions)] * 4


def after_other_groups() -> list[int]:
    """The first votes between hosts, after ranks 1 and 2 have been in a group without rank 0."""
    dist.new_group([1, 2])
    with mock.patch.dict(os.environ, {"TUTTI_SHARED_MEMORY": "off", "TUTTI_TIMEOUT": "5"}):
        votes = votes_of(Group.world(), "tick")
    votes.give(1 << dist.get_rank())
    return [votes.take()]


def test_ranks_may_have_been_in_different_groups(ranks: Ranks) -> None:
    assert ranks.run(after_other_groups, n=3) == [[7]] * 3


def alone() -> str:
    """The error of rank 0, whose peer does not vote."""
    with mock.patch.dict(os.environ, {"TUTTI_TIMEOUT": "1"}):
        votes = votes_of(Group.world(), "Checkpoints.tick")
        assert isinstance(votes, NamedVotes)
        if dist.get_rank():
            time.sleep(3)
            return ""
        votes.give(0)
        with pytest.raises(CommError) as caught:
            votes.take()
        return str(caught.value)


def test_a_rank_that_votes_alone_is_told_the_call(ranks: Ranks) -> None:
    said, _ = ranks.run(alone, n=2)
    assert "rank 1 did not join rank 0 in Checkpoints.tick within 1 s" in said
    assert "call Checkpoints.tick on every rank" in said
