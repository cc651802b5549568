"""Collectives between ranks of one host, in memory that they share.

A rank writes its value where the others can read it, says so, and each rank reads what it needs: no
sockets, no copies between. A value that lies in an arena already (`SharedGroup.empty`) is not even
written. Others go through *mailboxes*, chunk by chunk:

    rank 0   copy chunk 0 | sync | reduce chunk 0 | copy chunk 1 | sync | ...
    rank 1   copy chunk 0 | sync | reduce chunk 0 | copy chunk 1 | sync | ...

Each rank has two mailboxes and takes them in turn. When it writes turn t + 2, all have passed the sync
of turn t + 1, so nobody still reads turn t.

Reductions run over the group's ranks in its order, whoever computes them: every rank gets the same bits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tutti.comm.reduce import reduce_into
from tutti.comm.segment import Exchange, make_segment
from tutti.comm.signals import LINE, Signals

# What the ranks put into mailboxes at once, all together, and each at least: it stays in a cache.
_CHUNK_NBYTES, _LEAST_NBYTES = 2**21, 2**16
# Above so many bytes, more than two ranks reduce a part each instead of all each.
_SPLIT_NBYTES = 2**15
# What a rank reduces at once where values lie: the sum is still in the cache when it is given on.
_BLOCK_NBYTES = 2**18


class SharedGroup:
    """The ranks of one host that share memory, in the group's order.

    Args:
        ranks: the group's ranks in its order.
        position: this rank's place among them.
        exchange: gives a text to all ranks of the group and returns theirs; used to set up only.
        timeout_seconds: how long a collective waits.

    Raises:
        SharedMemoryError: on every rank, where memory cannot be shared.

    Collectives raise `PeerLost` or `PeerLate`. All ranks call them in the same order.
    """

    def __init__(
        self, ranks: Sequence[int], position: int, exchange: Exchange, timeout_seconds: float
    ) -> None:
        self.position, self.size, self._exchange = position, len(ranks), exchange
        pids = [int(text) for text in exchange(str(os.getpid()))]
        words = self.size * LINE
        self._chunk = max(_CHUNK_NBYTES // self.size, _LEAST_NBYTES)
        # Two mailboxes, and one for a rank's share of a reduction.
        memory = make_segment(words + 3 * self.size * self._chunk, position, exchange)
        self.signals = Signals(memory[:words], ranks, position, pids, timeout_seconds)
        self._mail = memory[words:].view(3, self.size, self._chunk)
        self._turn = 0
        self._arenas: list[Tensor] = []
        self._places: list[tuple[int, int]] = []

    # Memory of the group

    def arena(self, nbytes: int) -> Tensor:
        """New shared memory: `[size, nbytes]`, a row for each rank; all ranks call this together."""
        nbytes = -(-nbytes // LINE) * LINE
        memory = make_segment(self.size * nbytes, self.position, self._exchange)
        rows = memory.view(self.size, nbytes)
        begin = rows[self.position].data_ptr()
        self._arenas.append(rows)
        self._places.append((begin, begin + nbytes))
        return rows

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in an arena of its own; all ranks call this together."""
        nbytes = math.prod(shape) * dtype.itemsize
        return _typed(self.arena(max(nbytes, 1))[self.position], nbytes, dtype).view(*shape)

    def common(self, nbytes: int) -> Tensor:
        """New bytes that belong to no rank alone, 1-D; all ranks call this together."""
        return make_segment(nbytes, self.position, self._exchange)

    def everywhere(self, x: Tensor) -> list[Tensor] | None:
        """Each rank's tensor at the place that `x` has in this rank's row of an arena.

        None if `x` lies elsewhere, or is not contiguous.
        """
        if not x.is_contiguous():
            return None
        address = x.data_ptr()
        for place, (begin, end) in enumerate(self._places):
            if begin <= address < end:
                rows = self._arenas[place][:, address - begin :]
                return [_typed(row, x.nbytes, x.dtype).view(x.shape) for row in rows]
        return None

    # Collectives on whole tensors; parts are stacked along a first dim

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.signals.sync()

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """`x` reduced over the group, a new tensor."""
        flat = x.contiguous().view(-1)
        result = torch.empty_like(flat)
        lying = self.everywhere(flat)
        if lying is not None:
            self.signals.sync()
            reduce_into(result, lying, op)
            self.signals.arrive()
            return result.view(x.shape)
        for low, high in self._chunks(flat):
            split = self.size > 2 and (high - low) * x.itemsize > _SPLIT_NBYTES
            reduce = self._reduce_split if split else self._reduce_each
            reduce(flat[low:high], result[low:high], op)
        return result.view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """`[*shape]` of each rank to `[n, *shape]`."""
        flat = x.contiguous().view(-1)
        result = flat.new_empty(self.size, flat.numel())
        lying = self.everywhere(flat)
        if lying is not None:
            self.signals.sync()
            for row, part in zip(result, lying, strict=True):
                row.copy_(part)
            self.signals.arrive()
        else:
            result[self.position].copy_(flat)
            for low, high in self._chunks(flat):
                for j, part in enumerate(self._posted(flat[low:high])):
                    if j != self.position:
                        result[j, low:high].copy_(part)
        return result.view(self.size, *x.shape)

    def reduce_scatter(self, parts: Tensor, op: str) -> Tensor:
        """`[n, *shape]`, one part for each rank, to the reduced part `[*shape]` of this rank."""
        lying = self.everywhere(parts)
        if lying is not None:
            result = torch.empty_like(parts[0])
            self.signals.sync()
            reduce_into(result, [whole[self.position] for whole in lying], op)
            self.signals.arrive()
            return result
        rows = parts.contiguous().view(self.size, -1)
        result = torch.empty_like(rows[0])
        for low, high, got in self._exchanged(rows):
            reduce_into(result[low:high], got, op)
        return result.view(parts.shape[1:])

    def all_to_all(self, parts: Tensor) -> Tensor:
        """`[n, *shape]`, one part for each rank, to `[n, *shape]`, one part from each rank."""
        rows = parts.contiguous().view(self.size, -1)
        result = torch.empty_like(rows)
        for low, high, got in self._exchanged(rows):
            for j, part in enumerate(got):
                result[j, low:high].copy_(part)
        return result.view(parts.shape)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """The tensor of the rank at position `root`, a new one on the others."""
        flat = x.contiguous().view(-1)
        result = flat if self.position == root else torch.empty_like(flat)
        for low, high in self._chunks(flat):
            box = self._boxes(flat.dtype, high - low)
            if self.position == root:
                box[root].copy_(flat[low:high])
            self.signals.sync()
            if self.position != root:
                result[low:high].copy_(box[root])
        return result.view(x.shape)

    # Collectives on tensors that lie in arenas: any number of them with one meeting of the ranks

    def all_reduce_(self, xs: Sequence[Tensor], op: str) -> None:
        """Reduce each of `xs` in place: a rank reduces its part of them and gives it to all."""
        lying = [[row.view(-1) for row in self._rows(x)] for x in xs]
        self.signals.sync()
        for rows in lying:
            first, last = self._share(rows[0].numel(), self.position)
            step = _BLOCK_NBYTES // rows[0].itemsize
            for low in range(first, last, step):
                parts = [row[low : min(low + step, last)] for row in rows]
                own = parts[self.position]
                reduce_into(own, parts, op)
                for part in parts:
                    if part is not own:
                        part.copy_(own)
        self.signals.sync()

    def reduce_scatter_(self, wholes: Sequence[Tensor], op: str) -> list[Tensor]:
        """Of each `[n, *shape]` this rank's reduced part `[*shape]`, a new tensor.

        The memory of `wholes` may be written again after a `claim`.
        """
        lying = [self._rows(x) for x in wholes]
        return self.reduce([[whole[self.position] for whole in rows] for rows in lying], op)

    def reduce(self, lying: Sequence[Sequence[Tensor]], op: str) -> list[Tensor]:
        """Each of `lying`, a tensor of every rank that all can read, reduced: new tensors."""
        self.signals.sync()
        results = []
        for parts in lying:
            result = torch.empty(parts[0].shape, dtype=parts[0].dtype)
            reduce_into(result, parts, op)
            results.append(result)
        self.signals.arrive()
        return results

    def all_gather_(self, wholes: Sequence[Tensor]) -> None:
        """Each `[n, *shape]`, of which this rank has written its own part, gets those of the others.

        The own parts may be written again after a `claim`.
        """
        lying = [self._rows(x) for x in wholes]
        self.signals.sync()
        for x, rows in zip(wholes, lying, strict=True):
            for j, whole in enumerate(rows):
                if j != self.position:
                    x[j].copy_(whole[j])
        self.signals.arrive()

    def claim(self) -> None:
        """Return when the others have finished reading what this rank gave to earlier collectives."""
        self.signals.wait(self.signals.count)

    def _rows(self, x: Tensor) -> list[Tensor]:
        rows = self.everywhere(x)
        assert rows is not None, "a tensor outside of the arenas"
        return rows

    # Chunks

    def _chunks(self, flat: Tensor, num_parts: int = 1) -> list[tuple[int, int]]:
        """Ranges that fit a mailbox `num_parts` times; one for an empty tensor, so that all meet."""
        step = self._chunk // num_parts // LINE * LINE // flat.itemsize
        size = flat.numel()
        return [(low, min(low + step, size)) for low in range(0, max(size, 1), step)]

    def _boxes(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The mailboxes of this turn, one for each rank."""
        self._turn ^= 1
        return [_typed(row, numel * dtype.itemsize, dtype) for row in self._mail[self._turn]]

    def _posted(self, chunk: Tensor) -> list[Tensor]:
        """Every rank's chunk."""
        boxes = self._boxes(chunk.dtype, chunk.numel())
        boxes[self.position].copy_(chunk)
        self.signals.sync()
        return boxes

    def _reduce_each(self, chunk: Tensor, out: Tensor, op: str) -> None:
        """Every rank reduces all of the chunk."""
        boxes = self._posted(chunk)
        boxes[self.position] = chunk
        reduce_into(out, boxes, op)

    def _reduce_split(self, chunk: Tensor, out: Tensor, op: str) -> None:
        """Every rank reduces its share of the chunk and takes those of the others."""
        boxes = self._posted(chunk)
        done = [_typed(row, chunk.nbytes, chunk.dtype) for row in self._mail[2]]
        first, last = self._share(chunk.numel(), self.position)
        reduce_into(done[self.position][first:last], [box[first:last] for box in boxes], op)
        self.signals.sync()
        for j in range(self.size):
            first, last = self._share(chunk.numel(), j)
            out[first:last].copy_(done[j][first:last])

    def _exchanged(self, rows: Tensor) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Chunk by chunk (low, high), this rank's part from every rank."""
        for low, high in self._chunks(rows[0], self.size):
            boxes = self._boxes(rows.dtype, self.size * (high - low))
            boxes = [box.view(self.size, high - low) for box in boxes]
            for j in range(self.size):
                if j != self.position:
                    boxes[self.position][j].copy_(rows[j, low:high])
            self.signals.sync()
            got = [box[self.position] for box in boxes]
            got[self.position] = rows[self.position, low:high]
            yield low, high, got

    def _share(self, numel: int, position: int) -> tuple[int, int]:
        """The range of elements that a rank reduces: equal parts, in whole cache lines."""
        part = -(-numel // self.size)
        part = -(-part // LINE) * LINE
        return min(position * part, numel), min((position + 1) * part, numel)


def _typed(memory: Tensor, nbytes: int, dtype: torch.dtype) -> Tensor:
    return memory[:nbytes].view(dtype)
