"""A mesh: ranks arranged along named axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from tutti.errors import LayoutError


@dataclass(frozen=True)
class Mesh:
    """Ranks arranged along named axes, outermost first; the last axis varies fastest with the rank.

    >>> mesh = Mesh.parse("data=2 tensor=4")
    >>> mesh.num_ranks, mesh.coordinates(5)
    (8, {'data': 1, 'tensor': 1})
    """

    axes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `axis=size` words. Raises `LayoutError` for anything else."""
        pairs = []
        for word in text.split():
            name, _, size = word.partition("=")
            if not name.isidentifier() or not size.isdigit() or int(size) < 1:
                raise LayoutError(f'cannot read "{word}" as axis=size', fix='write "data=2"')
            pairs.append((name, int(size)))
        return cls(tuple(pairs))

    def __post_init__(self) -> None:
        if len({name for name, _ in self.axes}) != len(self.axes):
            raise LayoutError(f"an axis appears twice in {self}")

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)

    def __contains__(self, axis: object) -> bool:
        return any(axis == name for name, _ in self.axes)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.axes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    # A mesh, like a sharding, is a key of many caches, so it keeps its hash.
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.axes)

    def __reduce__(self) -> tuple[type[Mesh], tuple[object, ...]]:
        return Mesh, (self.axes,)  # hashes of text differ between processes

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis."""
        return dict(self.axes)

    def size(self, axes: str | Iterable[str]) -> int:
        """The product of the sizes of `axes`."""
        if isinstance(axes, str):
            axes = (axes,)
        sizes = self.sizes
        return math.prod([sizes[a] for a in axes])

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` along each axis. Raises `LayoutError` for a rank outside of the mesh."""
        coordinates, rest = {}, rank
        for name, size in reversed(self.axes):
            rest, coordinates[name] = divmod(rest, size)
        if rest:  # below 0 it stays below 0
            raise LayoutError(
                f'mesh "{self}" has no rank {rank}', fix=f"a rank from 0 to {self.num_ranks - 1}"
            )
        return dict(reversed(coordinates.items()))

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at `coordinates`."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def groups(self, axes: Iterable[str]) -> list[list[int]]:
        """The ranks that differ in `axes` only, each group ordered by `axes`, major to minor."""
        axes = tuple(axes)
        rest = [name for name in self if name not in axes]
        sizes = dict(self.axes)
        groups = []
        for outer in product(*(range(sizes[name]) for name in rest)):
            around = dict(zip(rest, outer, strict=True))
            groups.append(
                [
                    self.rank(around | dict(zip(axes, inner, strict=True)))
                    for inner in product(*(range(sizes[name]) for name in axes))
                ]
            )
        return groups

    def index(self, axes: Iterable[str], coordinates: dict[str, int]) -> int:
        """The position of `coordinates` in its group over `axes`, major to minor."""
        index, sizes = 0, dict(self.axes)
        for axis in axes:
            index = index * sizes[axis] + coordinates[axis]
        return index
