"""Plays each collective of a worker's program as one small sum on the servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tutti.errors import ServerError
from tutti.graph.players.by_dim import ByDim
from tutti.graph.players.move import Axes

# (name within the step, 1-D float64) -> the sum over the workers, the same bits for all.
Add = Callable[[str, Tensor], Tensor]
_MOST = 2**53  # the largest integer up to which float64 has all
_PAIRWISE = {"max": torch.maximum, "min": torch.minimum, "prod": torch.mul}


class SmallSums(ByDim):
    """A `graph.players.player.Player` for one of several workers, which communicate with servers only.

    Other collectives are sums, too: each worker adds its values at its own index, and zeros elsewhere.

    Args:
        add: sums values over the workers.
        worker, num_workers: this worker's index, and the number of workers.
    """

    def __init__(self, add: Add, worker: int, num_workers: int) -> None:
        self.add, self.worker, self.num_workers = add, worker, num_workers
        self._count = 0

    def begin(self) -> None:
        """Begin a new step: its sums count from 0."""
        self._count = 0

    def rank_in(self, axes: Axes) -> tuple[int, int]:
        """This worker's number, and the number of workers."""
        return self.worker, self.num_workers

    def reduced(self, xs: Sequence[Tensor], axes: Axes, op: str) -> list[Tensor]:
        """Each of `xs` reduced over the workers."""
        if op != "sum":
            rows = self.gathered(xs, axes)
            return [functools.reduce(_PAIRWISE[op], row.unbind()) for row in rows]
        flat = self._sum(torch.cat([_flat(x) for x in xs]))
        sums = flat.split([_count(x) for x in xs])
        return [_like(values, x) for values, x in zip(sums, xs, strict=True)]

    def gathered(self, xs: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """Each `[*shape]` of every worker as `[n, *shape]`."""
        return [self._rows(x) for x in xs]

    def scattered(self, xs: Sequence[Tensor], axes: Axes, op: str) -> list[Tensor]:
        """Of each `[n, *shape]`, one part for each worker, this worker's reduced part."""
        return [whole[self.worker].clone() for whole in self.reduced(xs, axes, op)]

    def exchanged(self, xs: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """Each `[n, *shape]`, one part for each worker, as `[n, *shape]`, one part from each worker."""
        return [rows[:, self.worker].contiguous() for rows in self.gathered(xs, axes)]

    def _rows(self, x: Tensor) -> Tensor:
        """Every worker's values, in order."""
        placed = torch.zeros(self.num_workers, _count(x), dtype=torch.float64)
        placed[self.worker] = _flat(x)
        found = self._sum(placed.flatten()).view(self.num_workers, -1)
        return torch.stack([_like(values, x) for values in found])

    def _sum(self, values: Tensor) -> Tensor:
        self._count += 1
        return self.add(f"{self._count}", values)


def _count(x: Tensor) -> int:
    """The float64 numbers that travel for `x`: two for a complex one."""
    return x.numel() * (2 if x.is_complex() else 1)


def _flat(x: Tensor) -> Tensor:
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    elif x.dtype == torch.int64 and bool((x.abs() > _MOST).any()):
        raise ServerError(
            f"a sum over workers of an integer above 2^53 ({x.dtype})",
            why="sums over workers travel in float64",
            fix="smaller integers, or a layout without server",
        )
    return x.reshape(-1).to("cpu", torch.float64)


def _like(values: Tensor, x: Tensor) -> Tensor:
    if x.is_complex():
        values = torch.complex(*values.view(-1, 2).unbind(-1))
    return values.to(x.device, x.dtype).view(x.shape)
