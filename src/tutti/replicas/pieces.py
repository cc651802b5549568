"""Several tensors as one row of numbers, cut in equal parts, one for each replica.

names      a........ b.. c..............
parts      0------ 1------ 2------ 3---          pieces  a:0 | a:7 b:0 c:0 | c:4 | c:12
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorPiece:
    """The numbers from `begin` to `end` of the tensor `name`, flattened."""

    name: str
    begin: int
    end: int

    @property
    def key(self) -> str:
        """Its name in a message."""
        return f"{self.name}:{self.begin}"

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The piece of those tensors; a view if the tensor is contiguous."""
        return tensors[self.name].reshape(-1)[self.begin : self.end]


def cut(tensors: Mapping[str, Tensor], count: int) -> list[list[TensorPiece]]:
    """The pieces of each of `count` parts, whose sizes differ by one at most."""
    total = sum(x.numel() for x in tensors.values())
    bounds = [total * j // count for j in range(count + 1)]
    parts: list[list[TensorPiece]] = []
    for low, high in pairwise(bounds):
        pieces, begin = [], 0
        for name, x in tensors.items():
            first, last = max(low - begin, 0), min(high - begin, x.numel())
            if first < last:
                pieces.append(TensorPiece(name, first, last))
            begin += x.numel()
        parts.append(pieces)
    return parts


def joined(
    pieces: Iterable[TensorPiece], values: Mapping[str, Tensor], likes: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors like `likes` from their pieces' values, zeros for missing pieces."""
    found = {
        n: torch.zeros_like(x, memory_format=torch.contiguous_format) for n, x in likes.items()
    }
    for piece in pieces:
        if piece.key in values:
            piece.of(found).copy_(values[piece.key])
    return found


def names_of(pieces: Iterable[TensorPiece]) -> Sequence[str]:
    """The tensors that have a piece among these."""
    return list(dict.fromkeys(piece.name for piece in pieces))
