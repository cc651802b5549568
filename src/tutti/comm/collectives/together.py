"""Several tensors in one collective: packed into one buffer, moved, taken apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tutti.comm.collectives.transport import Transport


def all_reduce(xs: Sequence[Tensor], op: str, via: Transport) -> list[Tensor]:
    """Each of `xs` reduced over the group."""

    if len(xs) == 1:
        return [via.all_reduce(xs[0], op)]

    def move(flats: list[Tensor]) -> list[Tensor]:
        total = via.all_reduce(torch.cat(flats), op)
        return list(total.split([flat.numel() for flat in flats]))

    flats = [x.reshape(-1) for x in xs]
    return [y.view(x.shape) for x, y in zip(xs, _by_dtype(flats, move), strict=True)]


def all_gather(xs: Sequence[Tensor], via: Transport) -> list[Tensor]:
    """Each `[*shape]` to `[n, *shape]`."""

    if len(xs) == 1:
        return [via.all_gather(xs[0])]

    def move(flats: list[Tensor]) -> list[Tensor]:
        rows = via.all_gather(torch.cat(flats))
        return list(rows.split([flat.numel() for flat in flats], dim=1))

    flats = [x.reshape(-1) for x in xs]
    return [y.reshape(len(y), *x.shape) for x, y in zip(xs, _by_dtype(flats, move), strict=True)]


def reduce_scatter(wholes: Sequence[Tensor], op: str, via: Transport) -> list[Tensor]:
    """Each `[n, *shape]`, one part for each rank, to the reduced part `[*shape]` of this rank."""

    if len(wholes) == 1:
        return [via.reduce_scatter(wholes[0], op)]

    def move(rows: list[Tensor]) -> list[Tensor]:
        part = via.reduce_scatter(torch.cat(rows, dim=1), op)
        return list(part.split([row.shape[1] for row in rows]))

    rows = [x.reshape(len(x), -1) for x in wholes]
    return [y.view(x.shape[1:]) for x, y in zip(wholes, _by_dtype(rows, move), strict=True)]


def _by_dtype(xs: list[Tensor], move: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """`move` the tensors of each dtype together, in the order in which dtypes first come."""
    positions: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(xs):
        positions.setdefault(x.dtype, []).append(i)
    results = list(xs)
    for chosen in positions.values():
        for i, y in zip(chosen, move([xs[i] for i in chosen]), strict=True):
            results[i] = y
    return results
