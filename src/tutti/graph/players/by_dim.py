"""The base of all players: cuts dims into parts and joins them, around moves of whole parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tutti.graph.players.dim_segments import join, part, share, split
from tutti.graph.players.move import Axes, Move
from tutti.graph.players.player import Like, SharedMemory


class ByDim(ABC):
    """A `Player` on moves of parts that are stacked along a first dim.

    A subclass moves whole parts. It overrides `start` and `finish` where moves can run beside the
    computation, `send` and `receive` in a pipeline, and `shared_memory`.
    """

    @abstractmethod
    def rank_in(self, axes: Axes) -> tuple[int, int]:
        """This rank's position in the group over `axes`, and the size of the group."""

    @abstractmethod
    def reduced(self, xs: Sequence[Tensor], axes: Axes, op: str) -> list[Tensor]:
        """Each of `xs` reduced over the group."""

    @abstractmethod
    def gathered(self, xs: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """Each `[*shape]` of every rank as `[n, *shape]`."""

    @abstractmethod
    def scattered(self, xs: Sequence[Tensor], axes: Axes, op: str) -> list[Tensor]:
        """Of each `[n, *shape]`, one part for each rank, this rank's reduced part."""

    @abstractmethod
    def exchanged(self, xs: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """Each `[n, *shape]`, one part for each rank, as `[n, *shape]`, one part from each rank."""

    def moved(self, move: Move, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of `move`."""
        kind, axes, wheres = move.kind, move.axes, move.wheres
        if kind == "all_reduce":
            return self.reduced(xs, axes, move.op)
        alone = len(xs) == len(wheres) == 1  # a loop would cost more than the dispatch
        if kind == "all_gather":
            rows = self.gathered(xs, axes)
            if alone:
                return [join(rows[0], *wheres[0])]
            return [join(row, *where) for row, where in zip(rows, wheres, strict=True)]
        _, n = self.rank_in(axes)
        if alone:
            cut = [split(xs[0], wheres[0][0], wheres[0][1], n)]
        else:
            cut = [split(x, where[0], where[1], n) for x, where in zip(xs, wheres, strict=True)]
        if kind == "reduce_scatter":
            return self.scattered(cut, axes, move.op)
        assert kind == "all_to_all", f"{kind} is no collective"
        rows = self.exchanged(cut, axes)
        return [join(row, *where[2:]) for row, where in zip(rows, wheres, strict=True)]

    # The protocol

    @property
    def shared_memory(self) -> SharedMemory | None:
        """None: the ranks share no memory."""
        return None

    def play(self, move: Move, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of `move` on `xs`."""
        return self.moved(move, xs)

    def start(self, move: Move, xs: Sequence[Tensor]) -> Any:
        """Play `move` at once."""
        return self.play(move, xs)

    def finish(self, underway: Any, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of the move that `start` played."""
        return underway

    def shard(self, x: Tensor, axes: Axes, dim: int, outer: int) -> Tensor:
        """This rank's part of an `x` that every rank of the group holds, copied; moves nothing."""
        position, n = self.rank_in(axes)
        return part(x, dim, outer, n, position)

    def partialize(self, x: Tensor, axes: Axes, op: str) -> Tensor:
        """`x` on the group's first rank, the reduction's neutral element on the others."""
        position, _ = self.rank_in(axes)
        return share(x, op, first=position == 0)

    def send(self, xs: Sequence[Tensor], source: int, to: int) -> None:
        """A player without a pipeline sends nothing."""
        raise AssertionError(f"no message from pipeline rank {source} to {to}: there is one only")

    def receive(self, source: int, to: int, likes: Sequence[Like]) -> list[Tensor]:
        """A player without a pipeline receives nothing."""
        raise AssertionError(f"no message from pipeline rank {source} to {to}: there is one only")

    # Single collectives by name

    def all_reduce(self, x: Tensor, axes: Axes, op: str) -> Tensor:
        """The sum, "max", "min" or "prod" of `x` over the group; same shape, a new tensor."""
        return self.play(Move.alike("all_reduce", axes, (), op), [x])[0]

    def all_gather(self, x: Tensor, axes: Axes, dim: int, outer: int) -> Tensor:
        """Parts of the group joined along `dim`: `(outer, inner)` becomes `(outer, n * inner)`."""
        return self.play(Move.alike("all_gather", axes, (dim, outer)), [x])[0]

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int, outer: int, op: str) -> Tensor:
        """This rank's part of the reduced `x`: `(outer, inner)` becomes `(outer, inner / n)`."""
        return self.play(Move.alike("reduce_scatter", axes, (dim, outer), op), [x])[0]

    def all_to_all(
        self,
        x: Tensor,
        axes: Axes,
        split_dim: int,
        split_outer: int,
        cat_dim: int,
        cat_outer: int,
    ) -> Tensor:
        """Split `split_dim` over the group and join `cat_dim` from it."""
        where = split_dim, split_outer, cat_dim, cat_outer
        return self.play(Move.alike("all_to_all", axes, where), [x])[0]
