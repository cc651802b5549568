"""The pieces of a rank on a clock: their work in order, gathers of weights and sums of gradients beside it.

    device   |wait| piece 1 | piece 2 |wait| piece 3 |
    link     |= 1 =|= 2 =|   |== 3 ==|= sum 1 =|= sum 2 =|

One bucket of weights is gathered while pieces before it work. A sum begins when its bucket is full. The link
takes one after the other, as `passes.overlap` places them and `graph_clock.py` plays them. A piece with
several buckets is played as so many equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from tutti.planner.estimates.graph_clock import OVERLAP_SLOWDOWN

_MOST_PARTS = 4  # of a piece: more change little
FULL = 0.95  # of a bucket: too little is left for others


@dataclass(frozen=True)
class PieceWork:
    """Seconds of a piece: of its kernels, of its collectives over other axes, of the gather of its weights
    and of the sum of its gradients; and the numbers of buckets of these."""

    kernels: float
    exchange: float = 0.0
    gather: float = 0.0
    total: float = 0.0
    num_gathers: float = 1.0
    num_sums: float = 1.0

    def parts(self) -> Sequence[PieceWork]:
        """One for each bucket."""
        gathers = self.num_gathers if self.gather else 0.0
        sums = self.num_sums if self.total else 0.0
        count = min(_MOST_PARTS, round(max(gathers, sums)))
        return (self,) if count <= 1 else (PieceWork(*(x / count for x in astuple(self))),) * count


@dataclass(frozen=True)
class PieceTimes:
    """Seconds of a row of pieces.

    seconds: of all. kernels: with the slowdown beside a collective. waits: for gathers and sums. hidden: of
    gathers and sums beside kernels. left: of sums behind the end, if nothing waits for them there.
    """

    seconds: float
    kernels: float
    waits: float
    hidden: float
    left: float = 0.0


def played(
    pieces: Sequence[PieceWork], *, lags: bool, one_link: bool, stays: bool = False
) -> PieceTimes:
    """The times of pieces.

    Args:
        pieces: in the order of the work.
        lags: a sum may end after the next one could begin: whole gradients wait for the end.
        one_link: the collectives over other axes take the same link.
        stays: the end does not wait for sums.
    """
    pieces = _gathered_at_once([part for piece in pieces for part in piece.parts()])
    now = free = last_sum = kernels = waits = hidden = filling = full = ahead = 0.0
    last = max((i for i, p in enumerate(pieces) if p.total), default=-1)
    ready: list[float] = []  # of the gathers that have begun
    for i, piece in enumerate(pieces):
        if not ready:
            free = piece.gather
            ready.append(free)
        waits += max(0.0, ready[i] - now)
        now = max(now, ready[i])
        while len(ready) < len(pieces) and (len(ready) == i + 1 or ahead < FULL):
            following = pieces[len(ready)]
            free = max(now, free) + following.gather if following.gather else free
            ahead += following.num_gathers if following.gather else 0.0
            ready.append(free if following.gather else now)
        if i + 1 < len(pieces) and pieces[i + 1].gather:  # it is in use next
            ahead -= pieces[i + 1].num_gathers
        beside = min(piece.kernels * OVERLAP_SLOWDOWN, max(0.0, free - now))
        worked = piece.kernels + beside * (1 - 1 / OVERLAP_SLOWDOWN)
        now, kernels, hidden = now + worked, kernels + worked, hidden + beside
        if piece.exchange and one_link:
            waits += max(0.0, free - now)
            now = free = max(now, free) + piece.exchange
        else:
            now += piece.exchange
        if piece.total:
            filling, full = filling + piece.total, full + piece.num_sums
        if filling and (full >= FULL or i >= last):
            if not lags:
                waits += max(0.0, last_sum - now)
                now = max(now, last_sum)
            free = last_sum = max(now, free) + filling
            filling = full = 0.0
    left = max(0.0, free - now)
    if stays:
        return PieceTimes(now, kernels, waits, hidden, left)
    return PieceTimes(now + left, kernels, waits + left, hidden)


def _gathered_at_once(pieces: Sequence[PieceWork]) -> list[PieceWork]:
    """The pieces, with the gather of each bucket before the first of the pieces that share it."""
    found, lead, full = list[PieceWork](), 0, 1.0
    for piece in pieces:
        if not piece.gather:
            found.append(piece)
        elif full >= FULL:
            lead, full = len(found), piece.num_gathers
            found.append(piece)
        else:
            full += piece.num_gathers
            found.append(replace(piece, gather=0.0, num_gathers=0.0))
            first = found[lead]
            gather, count = first.gather + piece.gather, first.num_gathers + piece.num_gathers
            found[lead] = replace(first, gather=gather, num_gathers=count)
    return found
