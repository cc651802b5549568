"""The union of all ranks' votes of one round, which the ranks read a round later, so that none waits.

    round    1       2       3
    rank 0   -       asks    reads "asks" of round 2
    rank 1   -       -       reads "asks" of round 2        both act in round 3

A vote is a set of bits. A rank waits only for ranks that are more than a round behind.
"""

from __future__ import annotations

import json
import os
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.failure import comm_error
from tutti.comm.collectives.fresh_group import fresh_group
from tutti.comm.collectives.group import Group, collective_timeout
from tutti.comm.host.segment import Exchange, SharedMemoryError, make_segment, memory_host
from tutti.comm.host.signals import LINE, Signals
from tutti.errors import CommError

NUM_BITS = 8


class Votes(Protocol):
    """The votes of a group's ranks; each rank calls `take` and then `give` once a round."""

    def give(self, vote: int) -> None:
        """Enter this rank's vote of this round; never waits."""
        ...

    def take(self) -> int:
        """The union of all ranks' votes of the last round; 0 in the first. Raises `RuntimeError`."""
        ...

    def drop(self) -> None:
        """End votes that have failed, which wakes ranks that still wait in them."""
        ...


class SharedVotes:
    """Votes in memory that the ranks of one host share: two words for each rank, used in turn.

    A rank overwrites a word two rounds later: by then it has seen the next round's counters of all ranks,
    which have read the word before.

    Args:
        ranks: the group's ranks in its order.
        position: this rank's index among them.
        pids: the process id of each.
        exchange: all-gathers a text in the group; used only during setup.

    Raises:
        SharedMemoryError: on every rank, where memory cannot be shared.
    """

    def __init__(
        self, ranks: tuple[int, ...], position: int, pids: list[int], exchange: Exchange
    ) -> None:
        self._size, self._position = len(ranks), position
        counters = self._size * LINE
        memory = make_segment(counters + 2 * self._size * 8, position, exchange)
        seconds = collective_timeout().total_seconds()
        self._signals = Signals(memory[:counters], ranks, position, pids, seconds)
        raw: Any = memory[counters:].numpy()
        self._words = memoryview(raw).cast("B").cast("Q")
        self._count: int | None = None

    def give(self, vote: int) -> None:
        """Enter this rank's vote of this round."""
        slot = (self._signals.count + 1) % 2
        self._words[slot * self._size + self._position] = vote
        self._count = self._signals.arrive()

    def take(self) -> int:
        """The union of the last round."""
        if self._count is None:
            return 0
        self._signals.wait(self._count)
        found, first = 0, self._count % 2 * self._size
        for j in range(self._size):
            found |= self._words[first + j]
        return found

    def drop(self) -> None:
        """Nothing: each rank itself sees the end of the others."""


class SentVotes:
    """Votes by an asynchronous all-reduce, for ranks of several hosts.

    Args:
        group: of these ranks alone, for CPU tensors, and used for nothing else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self._under_way: tuple[Any, Tensor] | None = None

    def give(self, vote: int) -> None:
        """Enter this rank's vote of this round."""
        bits = torch.tensor([vote >> k & 1 for k in range(NUM_BITS)], dtype=torch.uint8)
        work = dist.all_reduce(bits, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._under_way = work, bits

    def take(self) -> int:
        """The union of the last round."""
        if self._group is None:
            raise RuntimeError("the votes have ended")
        if self._under_way is None:
            return 0
        work, bits = self._under_way
        work.wait()
        return sum(bit << k for k, bit in enumerate(bits.tolist()))

    def drop(self) -> None:
        """Destroy the group."""
        self._under_way = None
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


class NamedVotes:
    """Votes whose errors are those of the user's call `name`; `shared` ones cost next to nothing."""

    def __init__(self, votes: Votes, group: Group, name: str) -> None:
        self._votes, self._group, self._name = votes, group, name
        self.shared = isinstance(votes, SharedVotes)

    def give(self, vote: int) -> None:
        """Enter this rank's vote of this round."""
        self._votes.give(vote)

    def take(self) -> int:
        """The union of the last round.

        Raises:
            CommError: a rank has gone, or does not come within `TUTTI_TIMEOUT`.
        """
        try:
            return self._votes.take()
        except RuntimeError as error:
            found = comm_error(error, self._name, (), 0, self._group)
            fix = f"call {self._name} on every rank: take it out of `if rank == 0:`"
            fix = f"{fix}; {found.fix}" if found.fix else fix
            raise CommError(found.what, why=found.why, fix=fix) from error

    def drop(self) -> None:
        """End votes that have failed, which wakes ranks that still wait in them."""
        self._votes.drop()


def votes_of(group: Group, name: str) -> NamedVotes:
    """Votes of the ranks of `group`, which call this together.

    Args:
        name: the user's call in which the ranks vote, for errors.
    """

    def exchange(text: str) -> list[str]:
        return exchange_texts(text, group)

    rank = group.ranks[group.position]
    mine = json.dumps([memory_host(rank), os.getpid()])
    said = [json.loads(text) for text in exchange(mine)]
    if len({host for host, _ in said}) == 1:
        try:
            pids = [pid for _, pid in said]
            return NamedVotes(SharedVotes(group.ranks, group.position, pids, exchange), group, name)
        except SharedMemoryError:
            pass
    made = fresh_group(group.ranks, backend="gloo").handle
    assert made is not None
    return NamedVotes(SentVotes(made), group, name)
