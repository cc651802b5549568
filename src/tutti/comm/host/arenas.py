"""Shared memory of a group: every rank can read the tensors in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MOST_VIEWS = 4096  # cached views of tensors: a step asks for the same ones again


class _Arena(NamedTuple):
    rows: Tensor  # one for each rank
    begin: int  # addresses of this rank's row
    end: int


class Arenas:
    """The arenas of one group; all ranks add the same sizes in the same order.

    Args:
        position: this rank's index in the group.
    """

    def __init__(self, position: int) -> None:
        self._position = position
        self._arenas: list[_Arena] = []
        self._views: dict[tuple[int, torch.dtype, torch.Size], tuple[Tensor, ...]] = {}

    def add(self, rows: Tensor) -> None:
        """`[size, nbytes]`, a row for each rank."""
        begin = rows[self._position].data_ptr()
        self._arenas.append(_Arena(rows, begin, begin + rows.shape[1]))

    def location(self, x: Tensor) -> int:
        """A number for the location of `x` in an arena, the same on all ranks; 0 outside of the arenas.

        Also 0 where `x` is not contiguous, is empty, or is a lazy conjugate.
        """
        if not self._arenas:
            return 0
        number, offset = self._find(x)
        return 0 if number < 0 else (number + 1) | offset << 16

    def everywhere(self, x: Tensor) -> list[Tensor] | None:
        """Each rank's tensor at the location of `x`; None where `location` is 0."""
        number, offset = self._find(x)
        if number < 0:
            return None
        key = (x.data_ptr(), x.dtype, x.shape)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            rows = self._arenas[number].rows[:, offset : offset + x.nbytes]
            views = self._views[key] = tuple(row.view(x.dtype).view(x.shape) for row in rows)
        return list(views)

    def _find(self, x: Tensor) -> tuple[int, int]:
        address = x.data_ptr()
        for number, (_, begin, end) in enumerate(self._arenas):
            if begin <= address < end:
                inside = x.numel() and address + x.nbytes <= end and x.is_contiguous()
                plain = inside and not x.is_conj() and not x.is_neg()
                return (number, address - begin) if plain else (-1, 0)
        return -1, 0
