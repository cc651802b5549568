"""The collectives of a program on tensors in shared memory of a host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.comm.collectives.groups import Axes, Groups
from tutti.comm.collectives.in_collective import InCollective
from tutti.comm.host.shared_memory import Filling, SharedGroup
from tutti.graph.players.dim_segments import segments, split
from tutti.graph.players.move import Move
from tutti.graph.players.player import Player


class _Gather(NamedTuple):
    """A `gather_into`, for tensors at these addresses.

    own: this rank's parts that are elsewhere, with their positions. filling: None outside of shared memory.
    """

    places: tuple[int, ...]
    nbytes: int
    own: Sequence[tuple[Tensor, int]] = ()
    filling: Filling | None = None


class InSharedMemory(InCollective):
    """The `graph.players.player.SharedMemory` of a player between ranks of one host.

    Args:
        groups: the groups of the player.
        player: plays the moves on tensors outside of shared memory.
        arenas: memory for the program's buffers, by axes; a row for each rank.
        wholes: the gathered form of state whose parts lie side by side, by axes and the part's address.
    """

    def __init__(
        self,
        groups: Groups,
        player: Player,
        arenas: Mapping[Axes, Tensor],
        wholes: Mapping[tuple[Axes, int], Tensor],
    ) -> None:
        super().__init__(groups)
        self._player, self._arenas, self._wholes = player, arenas, wholes
        self._state: Mapping[str, Tensor] = {}
        self._buffers: dict[Any, Tensor] = {}
        self._cut: dict[Any, list[Tensor]] = {}
        self._gathers: dict[tuple[Axes, tuple[str, ...]], _Gather] = {}

    def hold(self, state: Mapping[str, Tensor]) -> None:
        """Set the state, by name, into which the next call of the program gathers."""
        self._state = state

    def buffer(self, axes: Axes, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory in the group's arena, the same at every call; other ranks may still read its last value."""
        key = (axes, offset, tuple(shape), dtype)
        if key not in self._buffers:
            row = self._arenas[axes][self.groups[axes].position]
            nbytes = math.prod(shape) * dtype.itemsize
            self._buffers[key] = row[offset : offset + nbytes].view(dtype).view(*shape)
        return self._buffers[key]

    def claimed(self, x: Tensor, axes: Axes) -> Tensor:
        """The buffer `x`, once no other rank reads this rank's earlier values."""
        with self.waiting("buffer", axes, 0):
            self._shared(axes).claim()
        return x

    def whole(self, x: Tensor, axes: Axes) -> Tensor | None:
        """The gathered form of state, where `x` is this rank's part of it; None of any other tensor."""
        return self._wholes.get((axes, x.data_ptr()))

    def play(self, move: Move, xs: Sequence[Tensor]) -> list[Tensor]:
        """A move on tensors in shared memory: all-reduces in place, gathers as views."""
        kind, axes = move.kind, move.axes
        shared = self._shared(axes)
        if kind == "all_gather":
            looks = (self._wholes.get((axes, x.data_ptr())) for x in xs)
            wholes = [whole for whole in looks if whole is not None]
            if len(wholes) < len(xs):  # some state is outside of shared memory
                return self._player.play(move, xs)
            with self.waiting(kind, axes, 0):
                shared.barrier()
            return wholes
        with self.waiting(kind, axes, sum(x.nbytes for x in xs)):
            if kind == "all_reduce":
                shared.all_reduce_(xs, move.op)
                return list(xs)
            lying = [self._parts(x, axes, where) for x, where in zip(xs, move.wheres, strict=True)]
            if kind == "reduce_part":
                shared.reduce_(lying, move.op)
                return list(xs)
            assert kind == "reduce_scatter", f"no {kind} in shared memory"
            results = shared.reduce(lying, move.op)
            return [
                x if outer == 1 else x.flatten(dim % (x.dim() - 1), dim % (x.dim() - 1) + 1)
                for x, (dim, outer) in zip(results, move.wheres, strict=True)
            ]

    def gather_into(self, move: Move, names: Sequence[str], xs: Sequence[Tensor]) -> list[Tensor]:
        """Gather into the state `names`; each rank has a copy of it that the others can read."""
        axes = move.axes
        wholes = [self._state[name] for name in names]
        places = tuple(x.data_ptr() for x in (*wholes, *xs))
        key = axes, tuple(names)
        known = self._gathers.get(key)
        if known is None or known.places != places:
            known = self._gathers[key] = self._gather_of(axes, wholes, xs, places)
        if known.filling is None:
            gathered = self._player.play(move, xs)
            return [whole.copy_(new) for whole, new in zip(wholes, gathered, strict=True)]
        for part, k in known.own:
            part.copy_(xs[k])
        with self.waiting("all_gather", axes, known.nbytes):
            self._shared(axes).fill(known.filling)
        return wholes

    def _gather_of(
        self, axes: Axes, wholes: Sequence[Tensor], xs: Sequence[Tensor], places: tuple[int, ...]
    ) -> _Gather:
        shared, group = self._shared(axes), self.groups[axes]
        nbytes = sum(x.nbytes for x in xs)
        if any(shared.everywhere(whole) is None for whole in wholes):
            return _Gather(places, nbytes)
        rows = [whole.view(group.size, *x.shape) for whole, x in zip(wholes, xs, strict=True)]
        own = [(row[group.position], k) for k, row in enumerate(rows)]
        own = [(part, k) for part, k in own if part.data_ptr() != xs[k].data_ptr()]
        return _Gather(places, nbytes, own, shared.filling(rows))

    def part(self, x: Tensor, axes: Axes, dim: int, outer: int) -> Tensor:
        """This rank's part of `x`: a view, or a copy if its `outer` segments are not adjacent."""
        group = self.groups[axes]
        return split(x, dim, outer, group.size)[group.position]

    def meet(self, axes: Axes) -> None:
        """Return when every rank of the group has come here."""
        with self.waiting("meet", axes, 0):
            self._shared(axes).barrier()

    def _shared(self, axes: Axes) -> SharedGroup:
        found = self.groups.shared(axes)
        assert found is not None, f"the ranks over {axes} share no memory"
        return found

    def _parts(self, x: Tensor, axes: Axes, where: tuple[int, ...]) -> list[Tensor]:
        """This rank's part of every rank's tensor at the location of `x` in an arena.

        All are views. With several outer segments `dim` is the two dims `(outer, inner)`.
        """
        key = (axes, x.data_ptr(), tuple(x.shape), x.dtype, where)
        if key not in self._cut:
            group, rows = self.groups[axes], self._shared(axes).everywhere(x)
            assert rows is not None, "a buffer outside of the arenas"
            dim, outer = where
            n, own = group.size, group.position
            if outer == 1:
                self._cut[key] = [split(row, dim, outer, n)[own] for row in rows]
            else:
                self._cut[key] = [segments(row, dim, outer, n, own) for row in rows]
        return self._cut[key]
