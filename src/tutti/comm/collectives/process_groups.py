"""The collectives of a program between real ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from torch import Tensor

from tutti.comm.collectives import together
from tutti.comm.collectives.background import Background, Underway
from tutti.comm.collectives.groups import Axes, Groups
from tutti.comm.collectives.in_collective import InCollective
from tutti.comm.collectives.in_shared_memory import InSharedMemory
from tutti.graph.players.by_dim import ByDim
from tutti.graph.players.move import Move
from tutti.graph.players.player import Like, Messages


class ProcessGroups(InCollective, ByDim):
    """A `graph.players.player.Player` on shared memory, Gloo (CPU) or NCCL (CUDA), as `Groups` chooses.

    Args:
        groups: the groups of every tuple of axes that the program uses.
        messages: carries those between pipeline ranks; None without a pipeline.

    Every collective raises `CommError` when a peer is gone or does not come in time.
    """

    def __init__(self, groups: Groups, *, messages: Messages | None = None) -> None:
        super().__init__(groups)
        self._messages = messages
        self._memory: InSharedMemory | None = None
        self._background = Background()

    @property
    def shared_memory(self) -> InSharedMemory | None:
        """The moves on tensors in shared memory; None before `lodge`."""
        return self._memory

    def lodge(
        self, arenas: Mapping[Axes, Tensor], wholes: Mapping[tuple[Axes, int], Tensor]
    ) -> InSharedMemory:
        """Let a program play on these tensors in shared memory; see `InSharedMemory`."""
        self._memory = InSharedMemory(self.groups, self, arenas, wholes)
        return self._memory

    def play(self, move: Move, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of `move` on `xs`, new tensors."""
        if self.groups.shared(move.axes) is not None and xs[0].is_cpu:
            return self._played(move, xs)
        return self._background.in_turn(functools.partial(self._played, move, xs))

    def start(self, move: Move, xs: Sequence[Tensor]) -> Underway:
        """Begin `move` on `xs`; `finish` waits for it."""
        alike = "pipe" not in move.axes  # the stages of a pipeline run different programs
        return self._background.start(functools.partial(self._played, move, xs), xs, alike=alike)

    def finish(self, underway: Underway, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of the move that `start` began with `xs`."""
        return self._background.finish(underway)

    def send(self, xs: Sequence[Tensor], source: int, to: int) -> None:
        """Send `xs` to pipeline rank `to`."""
        if self._messages is None:
            super().send(xs, source, to)
        else:
            self._messages.send(xs, source, to)

    def receive(self, source: int, to: int, likes: Sequence[Like]) -> list[Tensor]:
        """The tensors from pipeline rank `source`."""
        if self._messages is None:
            return super().receive(source, to, likes)
        return self._messages.receive(source, to, likes)

    def _played(self, move: Move, xs: Sequence[Tensor]) -> list[Tensor]:
        if self.groups[move.axes].size == 1:
            return [x.clone() for x in xs]
        nbytes = xs[0].nbytes if len(xs) == 1 else sum([x.nbytes for x in xs])
        with self.waiting(move.kind, move.axes, nbytes):
            return self.moved(move, xs)

    def rank_in(self, axes: Axes) -> tuple[int, int]:
        """This rank's position in the group over `axes`, and how many ranks that has."""
        group = self.groups[axes]
        return group.position, group.size

    def reduced(self, xs: Sequence[Tensor], axes: Axes, op: str) -> list[Tensor]:
        """Each of `xs` reduced over the group."""
        return together.all_reduce(xs, op, self.groups.transport(axes, xs[0].device))

    def gathered(self, xs: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """Each `[*shape]` of every rank as `[n, *shape]`."""
        return together.all_gather(xs, self.groups.transport(axes, xs[0].device))

    def scattered(self, xs: Sequence[Tensor], axes: Axes, op: str) -> list[Tensor]:
        """Of each `[n, *shape]`, one part for each rank, this rank's reduced part."""
        return together.reduce_scatter(xs, op, self.groups.transport(axes, xs[0].device))

    def exchanged(self, xs: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """Each `[n, *shape]`, one part for each rank, as `[n, *shape]`, one part from each rank."""
        transport = self.groups.transport(axes, xs[0].device)
        return [transport.all_to_all(x) for x in xs]
