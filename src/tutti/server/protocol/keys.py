"""Blocks: the pieces of variables, each with a number (its key) and a server.

Rendezvous hashing (Thaler and Ravishankar, 1998): the owner of a block is the server with the highest hash of
(server, block). Every process computes it locally; an additional server moves only the blocks that it wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from torch import Tensor

from tutti.server.protocol.update import ServedVariable

BLOCK_NBYTES = 4 * 2**20


@dataclass(frozen=True)
class VariableBlock:
    """Elements (of a flat variable), rows, or all `[start:stop]` of a variable.

    Args:
        key: its number among all blocks of all variables.
        shape: of this piece in `update`.
        server: the server that owns it.
    """

    key: int
    variable: ServedVariable
    start: int
    stop: int
    shape: tuple[int, ...]
    server: int

    @property
    def nbytes(self) -> int:
        """Bytes of its weight."""
        return math.prod(self.shape) * self.variable.dtype.itemsize

    def of(self, whole: Tensor) -> Tensor:
        """This piece of the whole variable, or of a slot of its shape, as a view; a slot of another shape
        unchanged.

        Raises:
            RuntimeError: the blocks cut the variable flat, and `whole` is not contiguous.
        """
        if tuple(whole.shape) != self.variable.shape:
            return whole
        if self.variable.rows:
            return whole[self.start : self.stop]
        return whole.view(-1)[self.start : self.stop] if self.variable.divisible else whole


def blocks(
    variables: Sequence[ServedVariable], num_servers: int, *, nbytes: int = BLOCK_NBYTES
) -> tuple[VariableBlock, ...]:
    """The blocks of all variables, in order, of about `nbytes` each if the variable may be cut."""
    found: list[VariableBlock] = []
    for variable in variables:
        for number, (start, stop, shape) in enumerate(_pieces(variable, nbytes)):
            server = owner(f"{variable.name}/{number}", num_servers)
            found.append(VariableBlock(len(found), variable, start, stop, shape, server))
    return tuple(found)


def named(
    blocks: Sequence[VariableBlock] | Mapping[int, VariableBlock], found: Mapping[int, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(variable, tensor) of tensors by key, in the order of keys."""
    for key in sorted(found):
        yield blocks[key].variable.name, found[key]


def owner(name: str, num_servers: int) -> int:
    """The server with the highest hash of (server, name)."""
    return max(range(num_servers), key=lambda s: blake2b(f"{s}/{name}".encode()).digest())


def _pieces(variable: ServedVariable, nbytes: int) -> list[tuple[int, int, tuple[int, ...]]]:
    shape, size = variable.shape, math.prod(variable.shape)
    if variable.rows:
        row = shape[1:]
        length = max(1, nbytes // max(1, math.prod(row) * variable.dtype.itemsize))
        return [(a, b, (b - a, *row)) for a, b in _ranges(shape[0], length)]
    if variable.divisible:
        return [(a, b, (b - a,)) for a, b in _ranges(size, nbytes // variable.dtype.itemsize)]
    return [(0, size, shape)]


def _ranges(size: int, length: int) -> list[tuple[int, int]]:
    """`[0:size]` in pieces of nearly equal length, none longer than `length`."""
    num = max(1, -(-size // length))
    return [(size * i // num, size * (i + 1) // num) for i in range(num)]
