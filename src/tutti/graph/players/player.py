"""The protocols of the player of a program, for one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.graph.players.move import Axes, Move

# The shape and the dtype of a tensor to come.
Like = tuple[Sequence[int], torch.dtype]


class Messages(Protocol):
    """Messages between the ranks of a pipeline."""

    def send(self, xs: Sequence[Tensor], source: int, to: int) -> None:
        """Send `xs` from this pipeline rank `source` to pipeline rank `to`."""
        ...

    def receive(self, source: int, to: int, likes: Sequence[Like]) -> list[Tensor]:
        """The tensors that pipeline rank `source` has sent here."""
        ...


class Player(Messages, Protocol):
    """Plays every move of a partitioned program for one rank.

    Where its ranks share memory, and the program has tensors there, `shared_memory` plays the moves on these.
    """

    @property
    def shared_memory(self) -> SharedMemory | None:
        """The moves on tensors in memory that the ranks share; None without such memory."""
        ...

    def play(self, move: Move, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of a move on `xs`: new tensors, one for each."""
        ...

    def start(self, move: Move, xs: Sequence[Tensor]) -> Any:
        """Begin a move: a handle for `finish`. Until then `xs` must stay as they are."""
        ...

    def finish(self, underway: Any, xs: Sequence[Tensor]) -> list[Tensor]:
        """Wait for a move that `start` began with `xs`: its results."""
        ...

    def shard(self, x: Tensor, axes: Axes, dim: int, outer: int) -> Tensor:
        """This rank's part of an `x` that every rank of the group holds, copied; moves nothing."""
        ...

    def partialize(self, x: Tensor, axes: Axes, op: str) -> Tensor:
        """A whole `x` as a pending reduction: of a sum the first rank has it, the others zeros."""
        ...


class SharedMemory(Protocol):
    """The moves of a program on tensors in memory that the ranks of a group share."""

    def buffer(self, axes: Axes, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a value, the same at every call; others may still read its last value."""
        ...

    def claimed(self, x: Tensor, axes: Axes) -> Tensor:
        """The buffer `x`, once no other rank reads what this rank gave before."""
        ...

    def whole(self, x: Tensor, axes: Axes) -> Tensor | None:
        """The gathered form of state, where `x` is this rank's part of it; None of any other tensor."""
        ...

    def play(self, move: Move, xs: Sequence[Tensor]) -> list[Tensor]:
        """A move on tensors in shared memory: all-reduces in place, gathers as views.

        The kind "reduce_part" is a reduce-scatter in place: its results are the operands, and the part that
        `part` gives of each is reduced.
        """
        ...

    def gather_into(self, move: Move, names: Sequence[str], xs: Sequence[Tensor]) -> list[Tensor]:
        """Gather `xs` into the state `names`, of which they are parts."""
        ...

    def part(self, x: Tensor, axes: Axes, dim: int, outer: int) -> Tensor:
        """This rank's part of `x`: a view, but a copy where `outer` segments lie apart."""
        ...

    def meet(self, axes: Axes) -> None:
        """Return when every rank of the group has come here."""
        ...
