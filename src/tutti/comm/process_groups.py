"""The collectives of a program between real ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.comm.failure import Wait, comm_error, now_seconds
from tutti.comm.group import Group
from tutti.comm.groups import Groups
from tutti.graph.segments import join, split


class ProcessGroups:
    """A `graph.collectives.Player` on shared memory, Gloo (CPU) or NCCL (CUDA), as `Groups` has it.

    `current` is the collective that this rank is in, or the one that failed; None between them.

    Args:
        groups: the groups of every tuple of axes that the program uses.

    Every collective raises `CommError` when a peer is gone or does not come in time.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.current: Wait | None = None

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

    def shard(self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int) -> Tensor:
        """This rank's part of an `x` that every rank of the group holds, copied; moves nothing."""
        group = self.groups[axes]
        part = split(x, dim, outer, group.size)[group.position]
        return part.clone(memory_format=torch.contiguous_format)

    def partialize(self, x: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
        """`x` on the group's first rank, the reduction's neutral element on the others."""
        if op in ("max", "min") or self.groups[axes].position == 0:
            return x
        return torch.ones_like(x) if op == "prod" else torch.zeros_like(x)

    def _wait(self, name: str, axes: tuple[str, ...], x: Tensor, *args: Any) -> Tensor:
        """Collective `name` of the transport that the group has for `x`."""
        move = getattr(self.groups.transport(axes, x.device), name)
        self.current = Wait(name, axes, x.nbytes, now_seconds())
        try:
            result = move(x, *args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as exc:
            group: Group = self.groups[axes]
            raise comm_error(exc, name, axes, x.nbytes, group) from exc
        self.current = None
        return result
