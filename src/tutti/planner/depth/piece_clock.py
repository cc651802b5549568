"""The pieces of a rank on a clock: their work in order, gathers of weights and sums of gradients beside it.

    device   |wait| piece 1 | piece 2 |wait| piece 3 |
    link     |= 1 =|= 2 =|   |== 3 ==|= sum 1 =|= sum 2 =|

The weights of a piece are gathered while the piece before it works. A sum begins where its piece ends. The
link takes one after the other, as `passes.overlap` places them and `graph_clock.py` plays them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from tutti.planner.estimates.graph_clock import OVERLAP_SLOWDOWN


@dataclass(frozen=True)
class PieceWork:
    """Seconds of a piece: of its kernels, of its collectives over other axes, of the gather of its weights
    and of the sum of its gradients."""

    kernels: float
    exchange: float = 0.0
    gather: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class PieceTimes:
    """Seconds of a row of pieces.

    seconds: of all. kernels: with the slowdown beside a collective. waits: for gathers and sums. hidden: of
    gathers and sums beside kernels.
    """

    seconds: float
    kernels: float
    waits: float
    hidden: float


def played(pieces: Sequence[PieceWork], *, lags: bool, one_link: bool) -> PieceTimes:
    """The times of pieces.

    Args:
        pieces: in the order of the work.
        lags: a sum may end after the next one could begin: whole gradients wait for the end.
        one_link: the collectives over other axes take the same link.
    """
    now = free = ready = last_sum = kernels = waits = hidden = 0.0
    following = chain((p.gather for p in pieces[1:]), (0.0,))
    if pieces:
        free = ready = pieces[0].gather
    for piece, gather in zip(pieces, following, strict=True):
        waits += max(0.0, ready - now)
        now = max(now, ready)
        if gather:
            free = ready = max(now, free) + gather
        beside = min(piece.kernels * OVERLAP_SLOWDOWN, max(0.0, free - now))
        worked = piece.kernels + beside * (1 - 1 / OVERLAP_SLOWDOWN)
        now, kernels, hidden = now + worked, kernels + worked, hidden + beside
        if piece.exchange and one_link:
            waits += max(0.0, free - now)
            now = free = max(now, free) + piece.exchange
        else:
            now += piece.exchange
        if piece.total:
            if not lags:
                waits += max(0.0, last_sum - now)
                now = max(now, last_sum)
            free = last_sum = max(now, free) + piece.total
    waits += max(0.0, free - now)
    return PieceTimes(max(now, free), kernels, waits, hidden)
