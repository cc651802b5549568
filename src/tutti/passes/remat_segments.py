"""Cuts of the forward into segments that keep only their inputs.

At a *cut* few bytes cross from earlier nodes to later ones: in a residual network, between layers. With the
values across cuts kept, the backward recomputes one segment at a time:

    peak  =  max over segments of (bytes across the cuts up to it + bytes that the backward reads in it)

The choice of cuts minimizes this peak. With equal layers this is the square-root rule (Chen et al.,
"Training deep nets with sublinear memory cost", 2016), derived from the graph, without names of modules.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from tutti.graph.analysis.storage import StorageBlock, Storages
from tutti.passes.recompute import is_forward, state_only

# The number of limits on the size of a segment to try, and the most narrow positions.
_NUM_LIMITS, _NUM_POSITIONS = 24, 400


@dataclass(frozen=True)
class _Life:
    """A block that the forward makes at position `start` and itself reads last at `end`."""

    block: StorageBlock
    start: int
    end: int
    read: bool


def kept_blocks(graph: fx.Graph, storages: Storages) -> tuple[set[StorageBlock], set[StorageBlock]]:
    """The blocks to keep: those across the cuts; and the last segment, which the backward reads first."""
    nodes = [n for n in graph.nodes if is_forward(n)]
    lives = _lives(nodes, storages, state_only(graph))
    chosen = _SegmentCutter(lives, len(nodes)).chosen()
    last = chosen[-1] if chosen else -1
    crossing = {v.block for c in chosen for v in lives if v.start <= c < v.end}
    return crossing, {v.block for v in lives if v.read and v.start > last} - crossing


def _lives(nodes: Sequence[fx.Node], storages: Storages, lasting: set[fx.Node]) -> list[_Life]:
    order = {node: i for i, node in enumerate(nodes)}
    end: dict[StorageBlock, int] = {}
    read: set[StorageBlock] = set()
    for node in nodes:
        for block in storages.of[node]:
            for user in node.users:
                end[block] = max(end.get(block, 0), order.get(user, 0))
                if user.meta.get("region") == "backward":
                    read.add(block)
    return [
        _Life(b, order[b.node], e, b in read)
        for b, e in end.items()
        if b.node in order and b.node not in lasting
    ]


class _SegmentCutter:
    def __init__(self, lives: list[_Life], num_nodes: int) -> None:
        self.num_nodes = num_nodes
        steps = [0] * (num_nodes + 1)
        sizes = [0] * num_nodes
        for v in lives:
            steps[v.start] += v.block.nbytes
            steps[max(v.end, v.start)] -= v.block.nbytes
            sizes[v.start] += v.block.nbytes * v.read
        self.crossing = list(itertools.accumulate(steps))[:num_nodes]
        self.read = [0, *itertools.accumulate(sizes)]
        self.positions = self._narrow_positions({i for v in lives for i in (v.start, v.end)})
        self.since: dict[int, tuple[list[int], list[int]]] = {}
        for c in self.positions:
            over = sorted((v.start, v.block.nbytes) for v in lives if v.start <= c < v.end)
            sums = [0, *itertools.accumulate(n for _, n in over)]
            self.since[c] = [start for start, _ in over], sums

    def _narrow_positions(self, events: set[int]) -> list[int]:
        """Local minima of the bytes across a position; one position for equal values across."""
        ends = [i for i in range(self.num_nodes - 1) if i + 1 in events]
        sizes = [math.inf, *(self.crossing[i] for i in ends), math.inf]
        found = [i for k, i in enumerate(ends) if sizes[k] >= sizes[k + 1] <= sizes[k + 2]]
        return sorted(sorted(found, key=self.crossing.__getitem__)[:_NUM_POSITIONS])

    def chosen(self) -> list[int]:
        """The cuts with the lowest peak; of equal ones, the fewest."""
        total = self.read[-1]
        limits = [total * (0.8**k) for k in range(_NUM_LIMITS)]
        paths = [path for limit in limits if (path := self._cheapest(limit)) is not None]
        return min(paths, key=lambda path: (self._most_held(path), len(path)))

    def _cost(self, before: int, cut: int) -> int:
        """Bytes that cross `cut` and were made after `before`."""
        starts, sums = self.since[cut]
        return sums[-1] - sums[bisect.bisect_right(starts, before)]

    def _inside(self, before: int, cut: int) -> int:
        """Bytes made between two cuts that the backward reads."""
        return self.read[cut + 1] - self.read[before + 1]

    def _cheapest(self, limit: float) -> list[int] | None:
        """The cuts that keep the fewest bytes, no segment above `limit`, by a shortest path."""
        end = self.num_nodes - 1
        best: dict[int, tuple[float, int]] = {-1: (0.0, -1)}
        for k, cut in enumerate([*self.positions, end]):
            for before in (*reversed(self.positions[:k]), -1):
                if self._inside(before, cut) > limit:
                    break
                if before not in best:
                    continue
                price = best[before][0] + (0 if cut == end else self._cost(before, cut))
                if price < best.get(cut, (float("inf"), 0))[0]:
                    best[cut] = price, before
        if end not in best:
            return None
        path, cut = [], best[end][1]
        while cut >= 0:
            path.append(cut)
            cut = best[cut][1]
        return path[::-1]

    def _most_held(self, path: list[int]) -> int:
        kept = most = 0
        for before, cut in itertools.pairwise([-1, *path, self.num_nodes - 1]):
            most = max(most, kept + self._inside(before, cut))
            kept += self._cost(before, cut) if cut in self.since else 0
        return most
