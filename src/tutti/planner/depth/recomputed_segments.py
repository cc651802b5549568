"""Segments of a forward that keep only their inputs (`remat=full`), as `passes.remat_segments` cuts them.

pieces     |-- a --|- b -|--- c ---|- d -|
cuts             m1            m2               kept: the bytes across each
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

# The number of limits on the bytes of a segment to try.
_NUM_LIMITS = 24


@dataclass(frozen=True)
class RecomputedSegments:
    """Segments of a row of pieces.

    crossing: bytes across all cuts. above: the most bytes above those, while a segment is recomputed.
    begins: the first piece of each segment but the first.
    """

    crossing: float
    above: float
    begins: tuple[int, ...]

    @property
    def last(self) -> int:
        """The first piece of the last segment, which recomputes nothing."""
        return self.begins[-1] if self.begins else 0


@lru_cache(maxsize=4096)
def segments_of(inside: tuple[float, ...], across: tuple[float, ...]) -> RecomputedSegments:
    """The segments that hold the fewest bytes at once.

    Args:
        inside: bytes of each piece that its backward reads.
        across: bytes from each piece but the last to later ones.
    """
    limits = (sum(inside) * 0.8**k for k in range(_NUM_LIMITS))
    found = dict.fromkeys(tuple(_cuts(inside, across, limit)) for limit in limits)
    made = [_made(inside, across, cuts) for cuts in found]
    return min(made, key=lambda one: one.crossing + one.above)


def _cuts(inside: Sequence[float], across: Sequence[float], limit: float) -> Iterator[int]:
    """The first piece of each segment but the first: no segment of several pieces is above `limit`, and cuts
    are where few bytes cross."""
    begin = 0
    for i in range(len(inside)):
        while begin < i and sum(inside[begin : i + 1]) > limit:
            begin = _narrow(inside, across, begin, i)
            yield begin


def _narrow(inside: Sequence[float], across: Sequence[float], begin: int, end: int) -> int:
    """The best first piece of the next segment, in the later half of the bytes from `begin` to `end`."""
    half = sum(inside[begin:end]) / 2
    before = accumulate(inside[begin:end])
    late = [k for k, held in enumerate(before, begin + 1) if held >= half]
    return min(late, key=lambda k: (across[k - 1], -k))


def _made(
    inside: Sequence[float], across: Sequence[float], cuts: Sequence[int]
) -> RecomputedSegments:
    kept, most = 0.0, 0.0
    for begin, end in pairwise([0, *cuts, len(inside)]):
        most = max(most, kept + sum(inside[begin:end]))
        kept += across[end - 1] if end < len(inside) else 0.0
    return RecomputedSegments(kept, most - kept, tuple(cuts))
