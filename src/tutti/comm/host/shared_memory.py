"""Collectives between ranks of one host, in shared memory.

A rank writes its value to shared memory and signals; the others read it there, without sockets or further
copies. A value that is already in an arena (`SharedGroup.empty`) needs no write. Others go through
mailboxes, chunk by chunk.

Every reduction runs over the ranks in the group's order: every rank gets the same bits.

At the first sync of a collective the ranks compare its name, dtype, size, and the location of its tensor
in an arena. Ranks that differ raise an error before any of them reads a wrong value.
"""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutti.comm.host import mailboxes
from tutti.comm.host.arenas import Arenas
from tutti.comm.host.mailboxes import Mailboxes
from tutti.comm.host.reduce import reduce_blocks, reduce_into
from tutti.comm.host.segment import Exchange, make_segment
from tutti.comm.host.signals import LINE, Signals

# Above so many bytes, more than two ranks reduce one part each; below, each reduces all.
_SPLIT_NBYTES = 2**15
# Bytes that a rank reduces in an arena before it copies them to the others: still in the cache.
_GIVEN_NBYTES = 2**18


@dataclass(frozen=True)
class Filling:
    """The copies of an `all_gather_`: into the parts of other ranks in this rank's tensors, from theirs.

    note: equal on ranks in the same collective.
    """

    note: int
    parts: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)


class SharedGroup:
    """The ranks of one host that share memory, in the group's order.

    Args:
        ranks: the group's ranks in its order.
        position: this rank's index among them.
        exchange: all-gathers a text in the group; used only during setup.
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
            SharedMemoryError: on every rank, if it does not fit; the group works as before.
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
        """New bytes that all ranks write and read, 1-D; all ranks call this together."""
        return make_segment(nbytes, self.position, self._exchange)

    def everywhere(self, x: Tensor) -> list[Tensor] | None:
        """Each rank's tensor at the location of `x` in this rank's row of an arena.

        None if `x` is outside of the arenas, empty or not contiguous.
        """
        return self._arenas.everywhere(x)

    # Collectives on whole tensors; parts are stacked along a first dim. As in any collective, the
    # caller may overwrite the tensor when they return.

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

    # Collectives on tensors in arenas: any number of them with one sync of the ranks

    def all_reduce_(self, xs: Sequence[Tensor], op: str) -> None:
        """Reduce each of `xs` in place: a rank reduces its part of them and copies it to all."""
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
        """Each of `lying`, every rank's tensor in shared memory, reduced: new tensors.

        This rank may overwrite its own tensors after a `claim`.
        """
        results = [torch.empty(x[self.position].shape, dtype=x[0].dtype) for x in lying]
        self._reduce_each("reduce", results, lying, op)
        return results

    def reduce_(self, lying: Sequence[Sequence[Tensor]], op: str) -> None:
        """The same, each into this rank's own tensor, which no other rank may read."""
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
        """Fill each `[n, *shape]`, in which this rank has written its own part, with the others' parts.

        This rank may overwrite its own parts after a `claim`.
        """
        self.fill(self.filling(wholes))

    def filling(self, wholes: Sequence[Tensor]) -> Filling:
        """What `all_gather_` of these tensors copies: the same at every call while none of them moves."""
        made = Filling(self._note("all_gather_", "", wholes))
        for x in wholes:
            for j, whole in enumerate(self._rows(x)):
                if j != self.position:
                    made.parts.append(x[j])
                    made.sources.append(whole[j])
        return made

    def fill(self, filling: Filling) -> None:
        """An `all_gather_`."""
        self.signals.meet(filling.note)
        for part, source in zip(filling.parts, filling.sources, strict=True):
            part.copy_(source)
        self.signals.arrive()

    def claim(self) -> None:
        """Return when the others have read this rank's tensors of earlier collectives."""
        self.signals.wait(self.signals.count)

    def _rows(self, x: Tensor) -> list[Tensor]:
        rows = self.everywhere(x) if x.numel() else [x] * self.size
        assert rows is not None, "a tensor outside of the arenas, or not contiguous"
        return rows

    # Steps of a collective

    def _note(self, name: str, op: str, xs: Sequence[Tensor], *, placed: bool = True) -> int:
        """A number that is equal on ranks in the same collective; a hash of ints only, which is fixed."""
        words = [_number(name), _number(op)]
        for x in xs:
            location = self._arenas.location(x) if placed else 0
            words += (_number(x.dtype), x.numel(), location)
        return hash(tuple(words))

    def _chunks(
        self, note: int, flat: Tensor, num_parts: int = 1
    ) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """Each range that fits a mailbox, and its sync."""
        sync: Callable[[], None] = functools.partial(self.signals.meet, note)
        for low, high in self._mail.ranges(flat, num_parts):
            yield low, high, sync
            sync = self.signals.sync

    def _reduce(self, boxes: list[Tensor], out: Tensor, op: str) -> None:
        """Reduce `boxes` into `out`: all of it, or only this rank's share, with the others' copied."""
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
