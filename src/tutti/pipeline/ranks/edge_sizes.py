"""The size of the edges between pipeline ranks: no ranks wait in a circle.

A rank sends a message value by value, each in one slot of the edge or more, and waits while it is full:

    rank 0    0F0>1  0F1>1  0<1B0 ...     sends two messages before it takes one
    rank 1    1<0F0  1B0>0  1<0F1 ...     sends one before it takes the second

With fewer slots than a message needs, rank 0 may wait in its second send for rank 1, which waits in its own
send for rank 0. Whether the rows end depends on the slots alone, not on the speed of any rank: an edge has
one sender and one receiver, and both follow their rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutti.graph.ops.loop import RECEIVE, SEND, Body

# How many messages of one edge may wait for their receiver, so that a rank ahead of it goes on.
_MESSAGES_AHEAD = 4

# A slot of an edge between two pipeline ranks, filled or emptied.
_Turn = tuple[tuple[int, int], bool]


@dataclass(frozen=True)
class EdgeSize:
    """What an edge holds: `capacity` bytes, in `num_slots` slots. A value takes as many slots as it needs."""

    capacity: int
    num_slots: int

    def slots_for(self, nbytes: int) -> int:
        """The number of slots of a value."""
        return max(math.ceil(nbytes * self.num_slots / self.capacity), 1)


def size_of_edges(
    bodies: Sequence[Body], rank_of: Callable[[int], int], least: EdgeSize
) -> EdgeSize:
    """The size of each edge: at least `least`, room for some messages, and enough for all rows to end.

    Args:
        bodies: by pipeline rank.
        rank_of: the pipeline rank of a stage.
    """
    nbytes = {name: x.nbytes for body in bodies for name, x in body.vals.items()}
    messages = [names for body in bodies for names in body.messages.values()]
    size = EdgeSize(
        capacity=max(
            least.capacity,
            least.num_slots * max(nbytes.values(), default=0),
            _MESSAGES_AHEAD * max((sum(nbytes[n] for n in m) for m in messages), default=0),
        ),
        num_slots=max(least.num_slots, _MESSAGES_AHEAD * max(map(len, messages), default=0)),
    )
    rows = [_turns(body, rank_of, size, nbytes) for body in bodies]
    most = max(map(len, rows), default=0)
    while size.num_slots < most and not _all_end(rows, size.num_slots):
        size = EdgeSize(2 * size.capacity, 2 * size.num_slots)
    return size


def _turns(
    body: Body, rank_of: Callable[[int], int], size: EdgeSize, nbytes: dict[str, int]
) -> list[_Turn]:
    """Each slot that a rank fills (True) or empties, in the order of its row."""
    found: list[_Turn] = []
    for do in body.row:
        if do.way == SEND:
            edge, key = (rank_of(do.stage), rank_of(do.other)), (do.stage, do.kind, do.other)
        elif do.way == RECEIVE:
            edge, key = (rank_of(do.other), rank_of(do.stage)), (do.other, do.kind, do.stage)
        else:
            continue
        slots = sum(size.slots_for(nbytes[name]) for name in body.messages.get(key, ()))
        found += [(edge, do.way == SEND)] * slots
    return found


def _all_end(rows: list[list[_Turn]], slots: int) -> bool:
    """Whether every rank reaches the end of its row."""
    held: defaultdict[tuple[int, int], int] = defaultdict(int)
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                edge, sends = row[at[rank]]
                if held[edge] >= slots if sends else not held[edge]:
                    break
                held[edge] += 1 if sends else -1
                at[rank] += 1
                moved = True
    return all(position == len(row) for position, row in zip(at, rows, strict=True))
