"""The collectives of a worker's program, each by one small sum that the servers form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tutti.graph.dim_segments import join, part, share

# (name within the step, 1-D float64) -> the sum over the workers, the same bits for all.
Add = Callable[[str, Tensor], Tensor]
_PAIRWISE = {"max": torch.maximum, "min": torch.minimum, "prod": torch.mul}


class SmallSums:
    """A `graph.collectives.Player` for one of several workers, who talk to servers only.

    What is no sum is one, too: each adds its values in its own place, with zeros in the others'.

    Args:
        add: sums values over the workers.
        worker, num_workers: which part is this one's.
    """

    def __init__(self, add: Add, worker: int, num_workers: int) -> None:
        self.add, self.worker, self.num_workers = add, worker, num_workers
        self._count = 0

    def begin(self) -> None:
        """A new step: its sums are counted from 0."""
        self._count = 0

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
        """The sum, "max", "min" or "prod" of `x` over the workers."""
        if op == "sum":
            return self._total(x)
        return functools.reduce(_PAIRWISE[op], self._parts(x).unbind())

    def all_gather(self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int) -> Tensor:
        """The workers' parts joined along `dim`."""
        return join(self._parts(x), dim, outer)

    def reduce_scatter(
        self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int, op: str
    ) -> Tensor:
        """This worker's part of the reduced `x`."""
        return self.shard(self.all_reduce(x, axes, op), axes, dim, outer)

    def all_to_all(
        self,
        x: Tensor,
        axes: tuple[str, ...],
        split_dim: int,
        split_outer: int,
        cat_dim: int,
        cat_outer: int,
    ) -> Tensor:
        """Split one dim over the workers and join another from them."""
        whole = self.all_gather(x, axes, cat_dim, cat_outer)
        return self.shard(whole, axes, split_dim, split_outer)

    def shard(self, x: Tensor, axes: tuple[str, ...], dim: int, outer: int) -> Tensor:
        """This worker's part of an `x` that all have."""
        return part(x, dim, outer, self.num_workers, self.worker)

    def partialize(self, x: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
        """A whole `x` as part of a sum: the first worker has it, the others zeros."""
        return share(x, op, first=self.worker == 0)

    def together(
        self,
        kind: str,
        xs: Sequence[Tensor],
        axes: tuple[str, ...],
        wheres: Sequence[tuple[int, int]],
        op: str,
    ) -> list[Tensor]:
        """Several collectives of one kind by one sum."""
        if kind == "all_reduce" and op == "sum":
            flat = self._sum(torch.cat([_flat(x) for x in xs]))
            parts = flat.split([x.numel() for x in xs])
            return [_like(values, x) for values, x in zip(parts, xs, strict=True)]
        extra = (op,) if op else ()
        one = getattr(self, kind)
        reduces = kind == "all_reduce"
        return [
            one(x, axes, *(() if reduces else where), *extra)
            for x, where in zip(xs, wheres, strict=True)
        ]

    def _total(self, x: Tensor) -> Tensor:
        return _like(self._sum(_flat(x)), x)

    def _parts(self, x: Tensor) -> Tensor:
        """What every worker has, in order."""
        placed = torch.zeros(self.num_workers, x.numel(), dtype=torch.float64)
        placed[self.worker] = _flat(x)
        found = self._sum(placed.flatten()).view(self.num_workers, -1)
        return torch.stack([_like(values, x) for values in found])

    def _sum(self, values: Tensor) -> Tensor:
        self._count += 1
        return self.add(f"{self._count}", values)


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).to("cpu", torch.float64)


def _like(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x.device, x.dtype).view(x.shape)
