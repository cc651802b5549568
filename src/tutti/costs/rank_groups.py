"""The ranks of each group of a mesh on hosts: `data` of `data=4 tensor=2` on hosts of 4 has 2 a host.

    rank   0  1  2  3 | 4  5  6  7       hosts of 4
    data   0     1    | 2     3          the ranks with tensor=0

Ranks are in the order of the mesh: its last axis varies fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from tutti.costs.collective_seconds import RankGroup
from tutti.layout import Mesh


class RankGroups(Mapping[tuple[str, ...], RankGroup]):
    """The group of rank 0 for each tuple of axes; axes that the mesh lacks have one rank."""

    def __init__(self, mesh: Mesh, host_size: int) -> None:
        self._host_size = host_size
        self._strides: dict[str, tuple[int, int]] = {}
        stride = 1
        for axis, size in reversed(mesh.axes):
            self._strides[axis] = size, stride
            stride *= size

    def __getitem__(self, axes: tuple[str, ...]) -> RankGroup:
        steps = [self._strides[a] for a in axes if a in self._strides]
        size = math.prod(n for n, _ in steps)
        offsets = (range(0, n * stride, stride) for n, stride in steps)
        near = sum(1 for at in product(*offsets) if sum(at) < self._host_size)
        return RankGroup(size, max(1, near))

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return ((axis,) for axis in self._strides)

    def __len__(self) -> int:
        return len(self._strides)

    def crosses_hosts(self, axis: str) -> bool:
        """Whether neighbors along `axis` are on different hosts: the slowest pair counts."""
        size, stride = self._strides.get(axis, (1, 1))
        return size * stride > self._host_size

    def size(self, axes: Iterable[str]) -> int:
        """Ranks of a group."""
        return math.prod(self._strides.get(a, (1, 1))[0] for a in axes)
