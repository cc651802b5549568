"""The mean of the replicas' messages: each replica owns an equal part of the numbers.

    replica    0         1         2
    sends      .  b0 c0  a1 .  c1  a2 b2 .        its numbers of part j to replica j
    takes      a         b         c              the mean of its own part
    sends      a  a      b  b      c  c           that mean to all others

So with R replicas each sends 2 (R - 1) / R of a message, compressed or not. Compression rounds twice, and
error feedback keeps both errors. Each replica keeps the error of its own message: `e = x + e - c`. A part's
owner keeps the error of the mean: it sends nothing to itself, so it stores R times that error in place of its
own, which counts 1 / R next time.
The sum of the means taken is then the mean of the messages' sums, less the mean of the errors:

    sum of taken_t = mean of (sum of x_t) - mean of e_T
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.comm.collectives.compression import COMPRESSIONS
from tutti.replicas import traffic
from tutti.replicas.pieces import TensorPiece, cut, joined
from tutti.replicas.strategy import State
from tutti.replicas.traffic import Message


class Mean:
    """One replica's side of one mean.

    Args:
        compression: the format of messages; a tensor without an error in `state` travels uncompressed.
        message: this replica's message.
        state: with `error.name` for each compressed tensor.
        index, count: this replica's index, and the number of replicas.

    `parts` are the messages to each of them, `errors` the changes of the state.
    """

    def __init__(
        self, compression: str, message: Message, state: State, index: int, count: int
    ) -> None:
        self._compression, self._likes, self._index = compression, message, index
        compressed = compression in COMPRESSIONS
        self.errors = {
            f"error.{n}": state[f"error.{n}"].clone(memory_format=torch.contiguous_format)
            for n in message
            if compressed and f"error.{n}" in state
        }
        self._pieces = cut(message, count)
        self.parts = [self._part(j) for j in range(count)]

    def combine(self, part: int, messages: Sequence[Message]) -> Message:
        """The mean of a part of the replicas' messages, summed in their order, in the format of messages."""
        found: Message = {}
        for piece in self._pieces[part]:
            dtype = self._likes[piece.name].dtype
            xs = [traffic.decompressed(self._compression, piece.key, m, dtype) for m in messages]
            total = traffic.wide(xs[0])
            for x in xs[1:]:
                total = total + traffic.wide(x)
            mean = (total / len(xs)).to(dtype)
            found |= (
                self._compressed(piece, mean, len(xs))
                if part == self._index
                else self._compressed(piece, mean)
            )
        return found

    def assemble(self, parts: Sequence[Message]) -> Message:
        """The means of all parts as one message."""
        values: Message = {}
        for pieces, message in zip(self._pieces, parts, strict=True):
            for p in pieces:
                dtype = self._likes[p.name].dtype
                values[p.key] = traffic.decompressed(self._compression, p.key, message, dtype)
        return joined([p for pieces in self._pieces for p in pieces], values, self._likes)

    def _part(self, j: int) -> Message:
        found: Message = {}
        for piece in self._pieces[j]:
            x = piece.of(self._likes)
            if f"error.{piece.name}" in self.errors:
                x = x + self._error(piece)
                if j == self._index:  # the own part does not travel, so it has no error
                    self._error(piece).zero_()
                else:
                    found |= self._compressed(piece, x, 1)
                    continue
            found[piece.key] = x
        return {n: x.cpu() for n, x in found.items()}

    def _compressed(self, piece: TensorPiece, x: Tensor, times: int = 0) -> Message:
        """The message for a piece; keeps `times` its error."""
        if f"error.{piece.name}" not in self.errors:
            return {piece.key: x}
        message = traffic.compressed(self._compression, piece.key, x)
        if times:
            lost = x - traffic.decompressed(self._compression, piece.key, message, x.dtype)
            self._error(piece).copy_(lost * times)
        return message

    def _error(self, piece: TensorPiece) -> Tensor:
        return self.errors[f"error.{piece.name}"].view(-1)[piece.begin : piece.end]


def mean_of(messages: Sequence[Message]) -> Message:
    """The mean of whole messages in one process."""
    sides = [Mean("fp32", m, {}, i, len(messages)) for i, m in enumerate(messages)]
    parts = [side.combine(j, [s.parts[j] for s in sides]) for j, side in enumerate(sides)]
    return sides[0].assemble(parts)
