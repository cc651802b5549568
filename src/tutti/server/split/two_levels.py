"""Plays the collectives of a worker's program on two levels: between its ranks, and across workers.

all_reduce(x, replica+data)    all_reduce(all_reduce(x, data), replica)
all_gather(x, replica+data)    all_gather(all_gather(x, data), replica)        minor axes first
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tutti.graph.players.by_dim import ByDim
from tutti.graph.players.move import Axes, Move
from tutti.graph.players.player import Player
from tutti.layout import Mesh

REPLICA = "replica"
_STACKED, _EXCHANGED = (0, 1), (0, 1, 0, 1)  # `where` of parts along a first dim


class TwoLevels(ByDim):
    """A `graph.players.player.Player` for one rank of one of several workers.

    Args:
        inside: plays collectives over the worker's own axes.
        across: plays collectives over `replica` alone, between this rank and its counterparts in the other
            workers.
        mesh: of all workers' ranks, `replica` its first axis.
        coordinates: of this rank there.
    """

    def __init__(
        self, inside: Player, across: Player, mesh: Mesh, coordinates: dict[str, int]
    ) -> None:
        self.inside, self.across, self.mesh, self.coordinates = inside, across, mesh, coordinates

    def rank_in(self, axes: Axes) -> tuple[int, int]:
        """This rank's position in the group over `axes`, and how many ranks that has."""
        return self.mesh.index(axes, self.coordinates), self.mesh.size(axes)

    def reduced(self, xs: Sequence[Tensor], axes: Axes, op: str) -> list[Tensor]:
        """Each of `xs` reduced over the group."""
        for player, some in self._levels(axes):
            xs = player.play(Move.alike("all_reduce", some, (), op, count=len(xs)), xs)
        return list(xs)

    def gathered(self, xs: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """Each `[*shape]` of every rank as `[n, *shape]`."""
        assert REPLICA not in axes[1:], f"{axes}: workers are the outermost"
        rows = [x.unsqueeze(0) for x in xs]
        for player, some in self._levels(axes):
            rows = player.play(Move.alike("all_gather", some, _STACKED, count=len(rows)), rows)
        return rows

    def scattered(self, xs: Sequence[Tensor], axes: Axes, op: str) -> list[Tensor]:
        """Of each `[n, *shape]`, one part for each rank, this rank's reduced part."""
        if REPLICA not in axes:
            move = Move.alike("reduce_scatter", axes, _STACKED, op, count=len(xs))
            return [x.squeeze(0) for x in self.inside.play(move, xs)]
        position, _ = self.rank_in(axes)
        return [whole[position].clone() for whole in self.reduced(xs, axes, op)]

    def exchanged(self, xs: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """Each `[n, *shape]`, one part for each rank, as `[n, *shape]`, one part from each rank."""
        if REPLICA not in axes:
            return self.inside.play(Move.alike("all_to_all", axes, _EXCHANGED, count=len(xs)), xs)
        position, _ = self.rank_in(axes)
        return [rows[:, position].contiguous() for rows in self.gathered(xs, axes)]

    def _levels(self, axes: Axes) -> list[tuple[Player, Axes]]:
        """The player of each part of `axes`, minor ones first."""
        own, workers = tuple(a for a in axes if a != REPLICA), (REPLICA,)
        found = [(self.inside, own)] if own else []
        return found + ([(self.across, workers)] if REPLICA in axes else [])
