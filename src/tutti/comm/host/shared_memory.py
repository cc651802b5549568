"""Collectives between ranks of one host, in memory that they share.

A rank writes its value where the others can read it, says so, and each rank reads what it needs: no
sockets, no copies between. A value that lies in an arena already (`SharedGroup.empty`) is not even
written. Others go through mailboxes, chunk by chunk.

Reductions run over the group's ranks in its order, whoever computes them: every rank gets the same bits.

Where the ranks first meet in a collective they compare what they are in: its name, dtype, size, and the
location of its tensor in an arena. Ranks that differ are told so before any of them reads a wrong value.
"""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tutti.comm.host import mailboxes
from tutti.comm.host.arenas import Arenas
from tutti.comm.host.mailboxes import Mailboxes
from tutti.comm.host.reduce import reduce_blocks, reduce_into
from tutti.comm.host.segment import Exchange, make_segment
from tutti.comm.host.signals import LINE, Signals

# Above so many bytes, more than two ranks reduce a part each instead of all each.
_SPLIT_NBYTES = 2**15
# What is reduced in an arena and then given to the others: still in the cache.
_GIVEN_NBYTES = 2**18


class SharedGroup:
    """The ranks of one host that share memory, in the group's order.

    Args:
        ranks: the group's ranks in its order.
        position: this rank's index among them.
        exchange: gives a text to all ranks of the group and returns theirs; used to set up only.
        timeout_seconds: how long a collective waits.
        num_neighbors: how many ranks share the cores of this host; the group's by default.

    Raises:
        SharedMemoryError: on every rank, where memory cannot be shared.

    Collectives raise `PeerLost`, `PeerLate` or `PeerDiffers`. All ranks call them in the same order, with
    tensors at the same location of an arena or all of them outside.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        position: int,
        exchange: Exchange,
        timeout_seconds: float,
        num_neighbors: int = 0,
    ) -> None:
        self.position, self.size, self._exchange = position, len(ranks), exchange
        pids = [int(text) for text in exchange(str(os.getpid()))]
        words = -(-self.size * LINE // mailboxes.PAGE) * mailboxes.PAGE
        nbytes = words + mailboxes.num_bytes(self.size)
        memory = make_segment(nbytes, position, exchange, at_once=True)
        lines = memory[: self.size * LINE]
        self.signals = Signals(lines, ranks, position, pids, timeout_seconds, num_neighbors)
        self._mail = Mailboxes(memory[words:], position, self.size)
        self._arenas = Arenas(position)

    # Memory of the group

    def arena(self, nbytes: int) -> Tensor:
        """New shared memory: `[size, nbytes]`, a row for each rank; all ranks call this together.

        Raises:
            SharedMemoryError: on every rank, where it does not fit; the group works as before.
        """
        nbytes = -(-max(nbytes, 1) // LINE) * LINE
        memory = make_segment(self.size * nbytes, self.position, self._exchange)
        rows = memory.view(self.size, nbytes)
        self._arenas.add(rows)
        return rows

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in an arena of its own; all ranks call this together."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self.arena(nbytes)[self.position][:nbytes].view(dtype).view(*shape)

    def common(self, nbytes: int) -> Tensor:
        """New bytes that belong to no rank alone, 1-D; all ranks call this together."""
        return make_segment(nbytes, self.position, self._exchange)

    def everywhere(self, x: Tensor) -> list[Tensor] | None:
        """Each rank's tensor at the location that `x` has in this rank's row of an arena.

        None if `x` lies elsewhere, is empty or is not contiguous.
        """
        return self._arenas.everywhere(x)

    # Collectives on whole tensors; parts are stacked along a first dim. As in any collective, the
    # tensor that was given may be written again when they return.

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.signals.meet(self._note("barrier", "", ()))

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """`x` reduced over the group, a new tensor."""
        flat = _flat(x)
        result = torch.empty_like(flat)
        note = self._note("all_reduce", op, (flat,))
        lying = self.everywhere(flat)
        if lying is not None and (self.size == 2 or flat.nbytes <= _SPLIT_NBYTES):
            self.signals.meet(note)
            reduce_into(result, lying, op)
            self.signals.sync()
            return result.view(x.shape)
        for low, high, sync in self._chunks(note, flat):
            if lying is None:
                boxes = self._mail.post(flat[low:high], sync)
                boxes[self.position] = flat[low:high]  # the same numbers, and nearer
            else:
                sync()
                boxes = [row[low:high] for row in lying]
            self._reduce(boxes, result[low:high], op)
        if lying is not None:
            self.signals.sync()
        return result.view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """`[*shape]` of each rank to `[n, *shape]`."""
        flat = _flat(x)
        result = flat.new_empty(self.size, flat.numel())
        note = self._note("all_gather", "", (flat,))
        lying = self.everywhere(flat)
        if lying is not None:
            self.signals.meet(note)
            for row, part in zip(result, lying, strict=True):
                row.copy_(part)
            self.signals.sync()
            return result.view(self.size, *x.shape)
        for low, high, sync in self._chunks(note, flat):
            boxes = self._mail.post(flat[low:high], sync)
            boxes[self.position] = flat[low:high]
            for j, part in enumerate(boxes):
                result[j, low:high].copy_(part)
        return result.view(self.size, *x.shape)

    def reduce_scatter(self, parts: Tensor, op: str) -> Tensor:
        """`[n, *shape]`, one part for each rank, to the reduced part `[*shape]` of this rank."""
        rows = _flat(parts).view(self.size, -1)
        result = torch.empty_like(rows[0])
        note = self._note("reduce_scatter", op, (rows,))
        lying = self.everywhere(rows)
        if lying is not None:
            self.signals.meet(note)
            reduce_blocks(result, [whole[self.position] for whole in lying], op)
            self.signals.sync()
        else:
            for low, high, got in self._exchanged(note, rows):
                reduce_into(result[low:high], got, op)
        return result.view(parts.shape[1:])

    def all_to_all(self, parts: Tensor) -> Tensor:
        """`[n, *shape]`, one part for each rank, to `[n, *shape]`, one part from each rank."""
        rows = _flat(parts).view(self.size, -1)
        result = torch.empty_like(rows)
        note = self._note("all_to_all", "", (rows,))
        for low, high, got in self._exchanged(note, rows):
            for j, part in enumerate(got):
                result[j, low:high].copy_(part)
        return result.view(parts.shape)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """The tensor of the rank at position `root`, a new one on the others."""
        flat = _flat(x)
        result = flat if self.position == root else torch.empty_like(flat)
        note = self._note(f"broadcast {root}", "", (flat,), placed=False)
        for low, high, sync in self._chunks(note, flat):
            box = self._mail.take(flat.dtype, high - low)[root]
            if self.position == root:
                box.copy_(flat[low:high])
            sync()
            if self.position != root:
                result[low:high].copy_(box)
        return result.view(x.shape)

    # Collectives on tensors that lie in arenas: any number of them with one meeting of the ranks

    def all_reduce_(self, xs: Sequence[Tensor], op: str) -> None:
        """Reduce each of `xs` in place: a rank reduces its part of them and gives it to all."""
        lying = [[row.view(-1) for row in self._rows(x)] for x in xs]
        self.signals.meet(self._note("all_reduce_", op, xs))
        for rows in lying:
            first, last = self._share(rows[0].numel(), self.position)
            step = _GIVEN_NBYTES // rows[0].itemsize
            for low in range(first, last, step):
                parts = [row[low : min(low + step, last)] for row in rows]
                own = parts[self.position]
                reduce_into(own, parts, op)
                for part in parts:
                    if part is not own:
                        part.copy_(own)
        self.signals.sync()

    def reduce(self, lying: Sequence[Sequence[Tensor]], op: str) -> list[Tensor]:
        """Each of `lying`, a tensor of every rank where all can read it, reduced: new tensors.

        What this rank has given may be written again after a `claim`.
        """
        results = [torch.empty(x[self.position].shape, dtype=x[0].dtype) for x in lying]
        self._reduce_each("reduce", results, lying, op)
        return results

    def reduce_(self, lying: Sequence[Sequence[Tensor]], op: str) -> None:
        """The same, each into this rank's own tensor, which nobody else may read."""
        own = [parts[self.position] for parts in lying]
        self._reduce_each("reduce_", own, lying, op)

    def _reduce_each(
        self, name: str, results: list[Tensor], lying: Sequence[Sequence[Tensor]], op: str
    ) -> None:
        self.signals.meet(self._note(name, op, results, placed=False))
        for result, parts in zip(results, lying, strict=True):
            if all(part.is_contiguous() for part in parts):
                reduce_blocks(result.view(-1), [part.view(-1) for part in parts], op)
            else:
                reduce_into(result, parts, op)
        self.signals.arrive()

    def all_gather_(self, wholes: Sequence[Tensor]) -> None:
        """Each `[n, *shape]`, of which this rank has written its own part, gets those of the others.

        The own parts may be written again after a `claim`.
        """
        lying = [self._rows(x) for x in wholes]
        self.signals.meet(self._note("all_gather_", "", wholes))
        for x, rows in zip(wholes, lying, strict=True):
            for j, whole in enumerate(rows):
                if j != self.position:
                    x[j].copy_(whole[j])
        self.signals.arrive()

    def claim(self) -> None:
        """Return when the others have finished reading what this rank gave to earlier collectives."""
        self.signals.wait(self.signals.count)

    def _rows(self, x: Tensor) -> list[Tensor]:
        rows = self.everywhere(x) if x.numel() else [x] * self.size
        assert rows is not None, "a tensor outside of the arenas, or not contiguous"
        return rows

    # How ranks go through them

    def _note(self, name: str, op: str, xs: Sequence[Tensor], *, placed: bool = True) -> int:
        """A number that ranks in the same collective agree on; of ints only, whose hash is fixed."""
        words = [_number(name), _number(op)]
        for x in xs:
            location = self._arenas.location(x) if placed else 0
            words += (_number(x.dtype), x.numel(), location)
        return hash(tuple(words))

    def _chunks(
        self, note: int, flat: Tensor, num_parts: int = 1
    ) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """Each range that fits a mailbox, and how the ranks meet there."""
        sync: Callable[[], None] = functools.partial(self.signals.meet, note)
        for low, high in self._mail.ranges(flat, num_parts):
            yield low, high, sync
            sync = self.signals.sync

    def _reduce(self, boxes: list[Tensor], out: Tensor, op: str) -> None:
        """All of it, or this rank's share of it and from the others theirs."""
        if self.size == 2 or out.nbytes <= _SPLIT_NBYTES:
            reduce_into(out, boxes, op)
            return
        done = self._mail.shares(out.dtype, out.numel())
        first, last = self._share(out.numel(), self.position)
        reduce_into(done[self.position][first:last], [box[first:last] for box in boxes], op)
        self.signals.sync()
        for j in range(self.size):
            first, last = self._share(out.numel(), j)
            out[first:last].copy_(done[j][first:last])

    def _exchanged(self, note: int, rows: Tensor) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Chunk by chunk (low, high), this rank's part from every rank."""
        for low, high, sync in self._chunks(note, rows[0], self.size):
            boxes = self._mail.take(rows.dtype, self.size * (high - low))
            boxes = [box.view(self.size, high - low) for box in boxes]
            for j in range(self.size):
                if j != self.position:
                    boxes[self.position][j].copy_(rows[j, low:high])
            sync()
            got = [box[self.position] for box in boxes]
            got[self.position] = rows[self.position, low:high]
            yield low, high, got

    def _share(self, numel: int, position: int) -> tuple[int, int]:
        """The range of elements that a rank reduces: equal parts, in whole cache lines."""
        part = -(-numel // self.size)
        part = -(-part // LINE) * LINE
        return min(position * part, numel), min((position + 1) * part, numel)


def _flat(x: Tensor) -> Tensor:
    return (x.detach() if x.requires_grad else x).resolve_conj().resolve_neg().contiguous().view(-1)


@functools.cache
def _number(of: str | torch.dtype) -> int:
    return zlib.crc32(str(of).encode())
