"""The collectives of a worker's program: inside the worker between its ranks, and across workers.

all_reduce(x, replica+data)    all_reduce(all_reduce(x, data), replica)
all_gather(x, replica+data)    all_gather(all_gather(x, data), replica)        minor axes first
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tutti.graph.collectives import Player
from tutti.graph.dim_segments import part, share
from tutti.layout import Mesh

Axes = tuple[str, ...]
REPLICA = "replica"


class TwoLevels:
    """A `graph.collectives.Player` for one rank of one of several workers.

    Args:
        inside: plays what names axes of the worker's own.
        across: plays what names `replica` alone, between this rank and its like in the other workers.
        mesh: of all workers' ranks, `replica` its first axis.
        place: this rank's coordinates there.
    """

    def __init__(self, inside: Player, across: Player, mesh: Mesh, place: dict[str, int]) -> None:
        self.inside, self.across, self.mesh, self.place = inside, across, mesh, place

    def all_reduce(self, x: Tensor, axes: Axes, op: str) -> Tensor:
        """The sum, "max", "min" or "prod" of `x` over the group."""
        for player, some in self._levels(axes):
            x = player.all_reduce(x, some, op)
        return x

    def all_gather(self, x: Tensor, axes: Axes, dim: int, outer: int) -> Tensor:
        """Parts of the group joined along `dim`."""
        assert REPLICA not in axes[1:], f"{axes}: workers are the outermost"
        for player, some in self._levels(axes):
            x = player.all_gather(x, some, dim, outer)
        return x

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int, outer: int, op: str) -> Tensor:
        """This rank's part of the reduced `x`."""
        if REPLICA not in axes:
            return self.inside.reduce_scatter(x, axes, dim, outer, op)
        return self.shard(self.all_reduce(x, axes, op), axes, dim, outer)

    def all_to_all(
        self,
        x: Tensor,
        axes: Axes,
        split_dim: int,
        split_outer: int,
        cat_dim: int,
        cat_outer: int,
    ) -> Tensor:
        """Split one dim over the group and join another from it."""
        if REPLICA not in axes:
            given = (split_dim, split_outer, cat_dim, cat_outer)
            return self.inside.all_to_all(x, axes, *given)
        whole = self.all_gather(x, axes, cat_dim, cat_outer)
        return self.shard(whole, axes, split_dim, split_outer)

    def shard(self, x: Tensor, axes: Axes, dim: int, outer: int) -> Tensor:
        """This rank's part of an `x` that all have."""
        return part(x, dim, outer, self.mesh.size(axes), self.mesh.index(axes, self.place))

    def partialize(self, x: Tensor, axes: Axes, op: str) -> Tensor:
        """A whole `x` as part of a pending reduction: the first rank has it."""
        return share(x, op, first=self.mesh.index(axes, self.place) == 0)

    def together(
        self,
        kind: str,
        xs: Sequence[Tensor],
        axes: Axes,
        wheres: Sequence[tuple[int, int]],
        op: str,
    ) -> list[Tensor]:
        """Several collectives of one kind."""
        if kind in ("all_reduce", "all_gather") or REPLICA not in axes:
            for player, some in self._levels(axes):
                xs = player.together(kind, xs, some, wheres, op)
            return list(xs)
        return [
            self.reduce_scatter(x, axes, *where, op) for x, where in zip(xs, wheres, strict=True)
        ]

    def _levels(self, axes: Axes) -> list[tuple[Player, Axes]]:
        """Who plays which of `axes`, minor ones first."""
        own, workers = tuple(a for a in axes if a != REPLICA), (REPLICA,)
        found = [(self.inside, own)] if own else []
        return found + ([(self.across, workers)] if REPLICA in axes else [])
