"""The dims of `x[i, :, j]`: those with an index, the shape of the indices, and its position in the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from tutti.graph.edits.edit import Emit, stretched
from tutti.graph.ops.checked_ids import from_start

aten = torch.ops.aten


@dataclass(frozen=True)
class IndexLookup:
    """The shape of x, and an index or None for each of its dims, of a call of `index` or `index_put`."""

    x: tuple[int, ...]
    indices: tuple[fx.Node | None, ...]

    @staticmethod
    def of(node: fx.Node) -> IndexLookup | None:
        """The lookup of a call; None where an index is a mask."""
        given: Any = node.args
        x = tuple(int(n) for n in given[0].meta["val"].shape)
        indices = (*given[1], *[None] * (len(x) - len(given[1])))
        if any(i is not None and i.meta["val"].dtype == torch.bool for i in indices):
            return None
        return IndexLookup(x, indices)

    @cached_property
    def used(self) -> list[int]:
        """The dims of x with an index."""
        return [d for d, i in enumerate(self.indices) if i is not None]

    @cached_property
    def rest(self) -> list[int]:
        """The dims of x without one."""
        return [d for d, i in enumerate(self.indices) if i is None]

    @cached_property
    def common(self) -> tuple[int, ...]:
        """The shape to which all indices broadcast."""
        return tuple(torch.broadcast_shapes(*(self.shape_of(d) for d in self.used)))

    @cached_property
    def first(self) -> int:
        """The number of dims of the result before those of `common`."""
        together = self.used == list(range(self.used[0], self.used[-1] + 1))
        return self.used[0] if together else 0

    @cached_property
    def result(self) -> list[int]:
        """The shape of the result."""
        rest = [self.x[d] for d in self.rest]
        return [*rest[: self.first], *self.common, *rest[self.first :]]

    def shape_of(self, dim: int) -> tuple[int, ...]:
        """The shape of the index of a dim."""
        index = self.indices[dim]
        assert index is not None
        return tuple(int(n) for n in index.meta["val"].shape)

    def size(self, dims: Sequence[int]) -> int:
        """The product of the sizes of some dims of x."""
        return math.prod(self.x[d] for d in dims)

    def line(self, emit: Emit, dims: Sequence[int]) -> fx.Node:
        """The indices of `dims` as one into the flattened dims, int64, of shape `common`; each is checked."""
        line: fx.Node | None = None
        for d in dims:
            index = emit(from_start, self.indices[d], self.x[d], True)
            if line is not None:
                index = emit(aten.add.Tensor, emit(aten.mul.Tensor, line, self.x[d]), index)
            line = index
        assert line is not None
        return stretched(emit, line, self.common)
