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
        """The tensors that pipeline rank `source` sent to `to`, this one."""
        ...


class Player(Messages, Protocol):
    """Plays every move of a partitioned program for one rank.

    `shared_memory` plays the moves on tensors in memory that the ranks share.
    """

    @property
    def shared_memory(self) -> SharedMemory | None:
        """The moves on tensors in memory that the ranks share; None without such memory."""
        ...

    def play(self, move: Move, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of a move on `xs`: new tensors, one for each."""
        ...

    def start(self, move: Move, xs: Sequence[Tensor]) -> Any:
        """Begin a move and return a handle for `finish`. Until then `xs` must not change."""
        ...

    def finish(self, underway: Any, xs: Sequence[Tensor]) -> list[Tensor]:
        """Wait for a move that `start` began with `xs`, and return its results."""
        ...

    def shard(self, x: Tensor, axes: Axes, dim: int, outer: int) -> Tensor:
        """This rank's part of an `x` that every rank of the group holds, copied; moves nothing."""
        ...

    def partialize(self, x: Tensor, axes: Axes, op: str) -> Tensor:
        """A whole `x` as a pending reduction: for a sum, `x` on the first rank and zeros on the others."""
        ...


class SharedMemory(Protocol):
    """The moves of a program on tensors in memory that the ranks of a group share."""

    def buffer(self, axes: Axes, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a value, the same at every call; others may still read its last value."""
        ...

    def claimed(self, x: Tensor, axes: Axes) -> Tensor:
        """The buffer `x`, once no other rank still reads this rank's last value."""
        ...

    def whole(self, x: Tensor, axes: Axes) -> Tensor | None:
        """The gathered state of which `x` is this rank's part; None for any other tensor."""
        ...

    def play(self, move: Move, xs: Sequence[Tensor]) -> list[Tensor]:
        """A move on tensors in shared memory: all-reduces in place, gathers as views.

        The kind "reduce_part" is a reduce-scatter in place: its results are the operands, with only the
        part that `part` gives reduced.
        """
        ...

    def gather_into(self, move: Move, names: Sequence[str], xs: Sequence[Tensor]) -> list[Tensor]:
        """Gather the parts `xs` into the state `names`."""
        ...

    def part(self, x: Tensor, axes: Axes, dim: int, outer: int) -> Tensor:
        """This rank's part of `x`: a view, or a copy where its `outer` segments are not adjacent."""
        ...

    def meet(self, axes: Axes) -> None:
        """Return when every rank of the group has called it."""
        ...
