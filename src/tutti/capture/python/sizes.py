"""Sizes of a batch as symbols of a trace, so that one trace serves batches of many sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.symbolic import ConstantSource, DimDynamic

# A tensor of the batch by its number, and a dim of it.
Dim = tuple[int, int]
Shapes = Sequence[Sequence[int]]


class FreeSizes:
    """The sizes of a batch that are symbols, with their symbols in the last trace.

    Args:
        groups: for each free dim the number of its symbol; dims of one symbol have one size.
    """

    def __init__(self, groups: Mapping[Dim, int]) -> None:
        self.groups = dict(groups)
        self.symbols: dict[int, Any] = {}
        self._sizes: dict[int, Any] = {}

    @classmethod
    def between(cls, *batches: Shapes) -> FreeSizes:
        """The sizes that differ between batches; dims that are equal in all batches have one symbol."""
        groups: dict[tuple[int, ...], int] = {}
        found: dict[Dim, int] = {}
        for k, shapes in enumerate(zip(*batches, strict=True)):
            for d, sizes in enumerate(zip(*shapes, strict=True)):
                if len({*sizes}) > 1:
                    found[k, d] = groups.setdefault(sizes, len(groups))
        return cls(found)

    def symbolic(self, shapes: Shapes, mode: FakeTensorMode) -> list[list[Any]]:
        """The shapes with new symbols in place of free sizes."""
        self.symbols, self._sizes = {}, {}
        return [
            [self._size((k, d), n, mode) for d, n in enumerate(shape)]
            for k, shape in enumerate(shapes)
        ]

    def _size(self, dim: Dim, size: int, mode: FakeTensorMode) -> Any:
        group = self.groups.get(dim)
        if group is None:
            return size
        if group not in self._sizes:
            env, source = mode.shape_env, ConstantSource(f"size.{group}")
            assert env is not None
            symbol = env.create_symbol(size, source, DimDynamic.DYNAMIC)
            self.symbols[group] = symbol
            self._sizes[group] = env.create_symintnode(symbol, hint=size, source=source)
        return self._sizes[group]

    def sizes_in(self, shapes: Shapes) -> dict[int, int] | None:
        """The size of each symbol in a batch; None where dims of one symbol differ, or one is 0 or 1.

        To PyTorch sizes of 0 and 1 are never symbols.
        """
        found: dict[int, int] = {}
        for (k, d), group in self.groups.items():
            size = int(shapes[k][d])
            if size < 2 or found.setdefault(group, size) != size:
                return None
        return found

    def fixed(self, shapes: Shapes) -> list[tuple[int | None, ...]]:
        """The sizes that are not symbols; None in place of symbols."""
        return [
            tuple(None if (k, d) in self.groups else int(n) for d, n in enumerate(shape))
            for k, shape in enumerate(shapes)
        ]
