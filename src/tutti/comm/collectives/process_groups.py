"""The collectives of a program between real ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.comm.collectives import together
from tutti.comm.collectives.background import Background, Underway
from tutti.comm.collectives.failure import Wait, comm_error, now_seconds
from tutti.comm.collectives.groups import Groups
from tutti.comm.host.shared_memory import SharedGroup
from tutti.graph.dim_segments import join, part, share, split


class ProcessGroups:
    """A `graph.collectives.Player` on shared memory, Gloo (CPU) or NCCL (CUDA), as `Groups` has it.

    `current` is the collective that this rank is in, or the one that failed; None between them.

    Where ranks share memory, whoever runs a program also says: `arenas`, for its buffers, by axes;
    `wholes`, the gathered form of state whose parts lie side by side, by axes and the part's address;
    `state`, by name, into which it gathers. `places` carries what goes between the places of a pipeline.

    Args:
        groups: the groups of every tuple of axes that the program uses.

    Every collective raises `CommError` when a peer is gone or does not come in time.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.current: Wait | None = None
        self.arenas: dict[tuple[str, ...], Tensor] = {}
        self.wholes: dict[tuple[tuple[str, ...], int], Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.places: Any = None
        self._background = Background()
        self._buffers: dict[Any, Tensor] = {}
        self._cut: dict[Any, list[Tensor]] = {}

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
        """The sum, "max", "min" or "prod" of `x` over the group; same shape, a new tensor."""
        group = self.groups[axes]
        if group.size == 1:
            return x.clone()
        return self._wait("all_reduce", axes, x, op)

    def all_gather(self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int) -> Tensor:
        """Parts of the group joined along `dim`: `(outer, inner)` becomes `(outer, n * inner)`."""
        group = self.groups[axes]
        if group.size == 1:
            return x.clone()
        parts = self._wait("all_gather", axes, x)
        return join(parts, dim, outer)

    def reduce_scatter(
        self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int, op: str
    ) -> Tensor:
        """This rank's part of the reduced `x`: `(outer, inner)` becomes `(outer, inner / n)`."""
        group = self.groups[axes]
        if group.size == 1:
            return x.clone()
        parts = split(x, dim, outer, group.size)
        return self._wait("reduce_scatter", axes, parts, op)

    def all_to_all(
        self,
        x: Tensor,
        axes: tuple[str, ...],
        split_dim: int,
        split_outer: int,
        cat_dim: int,
        cat_outer: int,
    ) -> Tensor:
        """Split `split_dim` over the group and join `cat_dim` from it."""
        group = self.groups[axes]
        if group.size == 1:
            return x.clone()
        parts = split(x, split_dim, split_outer, group.size)
        parts = self._wait("all_to_all", axes, parts)
        return join(parts, cat_dim, cat_outer)

    def together(
        self,
        kind: str,
        xs: Sequence[Tensor],
        axes: tuple[str, ...],
        wheres: Sequence[tuple[int, int]],
        op: str,
    ) -> list[Tensor]:
        """Several collectives of one kind in one."""
        move = functools.partial(self._together, kind, xs, axes, wheres, op)
        near = self.groups.shared(axes) is not None and xs[0].device.type == "cpu"
        return move() if near else self._background.in_turn(move)

    def start(
        self,
        kind: str,
        xs: Sequence[Tensor],
        axes: tuple[str, ...],
        wheres: Sequence[tuple[int, int]],
        op: str,
    ) -> Underway:
        """Begin several collectives of one kind in one; `finish` waits for them."""
        return self._background.start(
            functools.partial(self._together, kind, xs, axes, wheres, op), xs
        )

    def finish(self, underway: Underway, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of what `start` began with `xs`."""
        return self._background.finish(underway)

    def _together(
        self,
        kind: str,
        xs: Sequence[Tensor],
        axes: tuple[str, ...],
        wheres: Sequence[tuple[int, int]],
        op: str,
    ) -> list[Tensor]:
        group = self.groups[axes]
        if group.size == 1:
            return [x.clone() for x in xs]
        via = self.groups.transport(axes, xs[0].device)
        with self._waiting(kind, axes, sum(x.nbytes for x in xs)):
            if kind == "all_reduce":
                return together.all_reduce(xs, op, via)
            if kind == "all_gather":
                rows = together.all_gather(xs, via)
                return [join(parts, *where) for parts, where in zip(rows, wheres, strict=True)]
            parts = [split(x, *where, group.size) for x, where in zip(xs, wheres, strict=True)]
            return together.reduce_scatter(parts, op, via)

    def memory(
        self, axes: tuple[str, ...], offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Memory in the group's arena, the same at every call; others may read yet what lay there before."""
        key = (axes, offset, tuple(shape), dtype)
        if key not in self._buffers:
            row = self.arenas[axes][self.groups[axes].position]
            nbytes = math.prod(shape) * dtype.itemsize
            self._buffers[key] = row[offset : offset + nbytes].view(dtype).view(*shape)
        return self._buffers[key]

    def claimed(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """`x`, which lies in the group's arena, once nobody reads what this rank gave before."""
        with self._waiting("buffer", axes, 0):
            self._shared(axes).claim()
        return x

    def together_(
        self,
        kind: str,
        xs: Sequence[Tensor],
        axes: tuple[str, ...],
        wheres: Sequence[tuple[int, int]],
        op: str,
    ) -> list[Tensor]:
        """Several collectives on tensors in shared memory; gathers are views of it."""
        shared = self._shared(axes)
        if kind == "all_gather":
            wholes = [self.wholes.get((axes, x.data_ptr())) for x in xs]
            if any(whole is None for whole in wholes):  # state that has not been put there
                return self.together(kind, xs, axes, wheres, op)
            with self._waiting(kind, axes, 0):
                shared.barrier()
            return wholes  # type: ignore[return-value]
        with self._waiting(kind, axes, sum(x.nbytes for x in xs)):
            if kind == "all_reduce":
                shared.all_reduce_(xs, op)
                return list(xs)
            lying = [self._parts(x, axes, where) for x, where in zip(xs, wheres, strict=True)]
            if kind == "reduce_part":
                shared.reduce_(lying, op)
                return list(xs)
            return shared.reduce(lying, op)

    def gather_into(
        self,
        names: Sequence[str],
        xs: Sequence[Tensor],
        axes: tuple[str, ...],
        wheres: Sequence[tuple[int, int]],
    ) -> list[Tensor]:
        """Gathers into the state `names`, of which each rank has a copy that the others can read."""
        shared, group = self._shared(axes), self.groups[axes]
        wholes = [self.state[name] for name in names]
        if any(shared.everywhere(whole) is None for whole in wholes):
            gathered = self.together("all_gather", xs, axes, wheres, "")
            return [whole.copy_(new) for whole, new in zip(wholes, gathered, strict=True)]
        rows = [whole.view(group.size, *x.shape) for whole, x in zip(wholes, xs, strict=True)]
        for row, x in zip(rows, xs, strict=True):
            if row[group.position].data_ptr() != x.data_ptr():
                row[group.position].copy_(x)
        with self._waiting("all_gather", axes, sum(x.nbytes for x in xs)):
            shared.all_gather_(rows)
        return wholes

    def part(self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int) -> Tensor:
        """This rank's part of `x`, a view."""
        group = self.groups[axes]
        return split(x, dim, outer, group.size)[group.position]

    def meet(self, axes: tuple[str, ...]) -> None:
        """Return when every rank of the group has come here."""
        with self._waiting("meet", axes, 0):
            self._shared(axes).barrier()

    def send(self, xs: Sequence[Tensor], source: int, to: int) -> None:
        """Send `xs` to the rank at place `to` of the pipeline."""
        self.places.send(xs, source, to)

    def receive(self, source: int, to: int, likes: Sequence[Any]) -> list[Tensor]:
        """What the rank at place `source` has sent here."""
        return self.places.receive(source, to, likes)

    def _shared(self, axes: tuple[str, ...]) -> SharedGroup:
        found = self.groups.shared(axes)
        assert found is not None, f"the ranks over {axes} share no memory"
        return found

    def _parts(self, x: Tensor, axes: tuple[str, ...], where: tuple[int, int]) -> list[Tensor]:
        """Every rank's tensor at the place of `x` in an arena, as far as this rank reduces it."""
        key = (axes, x.data_ptr(), tuple(x.shape), x.dtype, tuple(where))
        if key not in self._cut:
            group, rows = self.groups[axes], self._shared(axes).everywhere(x)
            assert rows is not None, "a buffer outside of the arenas"
            self._cut[key] = [split(row, *where, group.size)[group.position] for row in rows]
        return self._cut[key]

    def shard(self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int) -> Tensor:
        """This rank's part of an `x` that every rank of the group holds, copied; moves nothing."""
        group = self.groups[axes]
        return part(x, dim, outer, group.size, group.position)

    def partialize(self, x: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
        """`x` on the group's first rank, the reduction's neutral element on the others."""
        return share(x, op, first=self.groups[axes].position == 0)

    def _wait(self, name: str, axes: tuple[str, ...], x: Tensor, *args: Any) -> Tensor:
        """Collective `name` of the transport that the group has for `x`."""
        transport = self.groups.transport(axes, x.device)
        move = getattr(transport, name)

        def moved() -> list[Tensor]:
            with self._waiting(name, axes, x.nbytes):
                return [move(x, *args)]

        near = transport is self.groups.shared(axes)
        return (moved() if near else self._background.in_turn(moved))[0]

    def _waiting(self, name: str, axes: tuple[str, ...], nbytes: int) -> _Waiting:
        """While a collective is under way: `current` says which, errors say more."""
        return _Waiting(self, Wait(name, axes, nbytes, now_seconds()))


class _Waiting:
    """A `with` that is entered at every collective: a generator's would cost three times as much."""

    __slots__ = ("_player", "_wait")

    def __init__(self, player: ProcessGroups, wait: Wait) -> None:
        self._player, self._wait = player, wait

    def __enter__(self) -> None:
        self._player.current = self._wait

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._player.current = None
        elif isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            name, axes, nbytes, _ = self._wait
            raise comm_error(error, name, axes, nbytes, self._player.groups[axes]) from error
