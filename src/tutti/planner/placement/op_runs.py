"""Repeated layers of a graph, found in the order of its ops: runs of equal stretches.

    ops     e e  a b c d  a b c d  a b c d  h h
    run          start    period 4, count 3

Equal stretches have the same ops with the same shapes, dtypes and constants. No name counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from tutti.graph.randomness.draw import draw
from tutti.rules.book import call_of

# Ops that must agree for two positions to suggest a period, and the number of periods to try.
_ALIKE = 8
_MOST_PERIODS = 24


@dataclass(frozen=True)
class Stretch:
    """`count` stretches of `period` ops from `start` on; a part of one more may follow, up to `stop`."""

    start: int
    period: int
    stop: int

    @property
    def count(self) -> int:
        """Whole stretches."""
        return (self.stop - self.start) // self.period


def signatures(nodes: Sequence[fx.Node]) -> list[int]:
    """A number for each op: equal for equal calls of one region. The stream of a random op does not count."""
    known: dict[object, int] = {}
    found = []
    for node in nodes:
        call: Any = node.args[:-1] if node.target is draw else call_of(node)
        key = (node.target, node.meta.get("region"), call if node.target is not draw else str(call))
        found.append(known.setdefault(key, len(known)))
    return found


def runs_of(ids: Sequence[int], *, least: int = 2) -> list[Stretch]:
    """Runs that do not overlap, in order; those that cover the most ops come first in the choice.

    Args:
        ids: a number for each op.
        least: whole stretches that a run must have.
    """
    given = np.asarray(ids)
    found = [run for period in _periods(ids) for run in _with_period(given, period, least)]
    chosen: list[Stretch] = []
    for run in sorted(found, key=lambda r: (r.start - r.stop, r.period, r.start)):
        if all(run.stop <= other.start or other.stop <= run.start for other in chosen):
            chosen.append(run)
    return sorted(chosen, key=lambda r: r.start)


def doubled(run: Stretch) -> Stretch | None:
    """The same run in stretches of twice the length; None if it is too short."""
    wide = Stretch(run.start, 2 * run.period, run.stop)
    return wide if wide.count >= 2 else None


def _periods(ids: Sequence[int]) -> list[int]:
    """The most frequent distances between equal sequences of ops."""
    last: dict[tuple[int, ...], int] = {}
    gaps: Counter[int] = Counter()
    for i in range(len(ids) - _ALIKE + 1):
        key = tuple(ids[i : i + _ALIKE])
        if key in last:
            gaps[i - last[key]] += 1
        last[key] = i
    return [gap for gap, _ in sorted(gaps.items(), key=lambda g: (-g[1], g[0]))[:_MOST_PERIODS]]


def _with_period(ids: np.ndarray, period: int, least: int) -> list[Stretch]:
    same = np.concatenate([[False], ids[:-period] == ids[period:], [False]]).astype(np.int8)
    edges = np.diff(same)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [
        Stretch(int(a), period, int(b) + period)
        for a, b in zip(starts, stops, strict=True)
        if b - a >= (least - 1) * period
    ]
