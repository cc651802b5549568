"""One directed edge between two ranks: the receiver gets the sender's tensors in order.

Between ranks of a host the edge is a ring of slots in shared memory. Large tensors go through it
slot by slot, so that the receiver copies one while the sender fills the next:

    slots     [ 4 | 5 | 2 | 3 ]      sender has filled 5, receiver has taken 2
                    ^ next to fill, once the receiver has taken 2

Between hosts, and between GPUs, each edge has its own group of torch.distributed: messages of one edge
never wait for those of another.

The capacity of an edge bounds its unreceived bytes. `send` returns at once below the capacity, so two ranks
may both send first; beyond it `send` waits for the other's `recv`. On a GPU the stream does so, not the host:
an NCCL send on the stream of the step itself would end only with the receive of the other rank, and two ranks
that both send first would wait for each other.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.collectives.failure import naming
from tutti.comm.collectives.group import Group
from tutti.comm.host.signals import LINE, PeerDiffers, Signals

NUM_SLOTS = 8
DEFAULT_CAPACITY = 2**22  # bytes
_PAGE = 4096


class Channel(Protocol):
    """A directed edge; the sender calls `send`, the receiver `recv`, both in the same order."""

    def send(self, x: Tensor, *, more: bool = False) -> None:
        """Send `x`; the caller may overwrite it afterwards.

        With `more` another tensor follows, without which the receiver can do nothing: it may sleep on.

        Raises:
            CommError: the receiver is gone, or has not come in time.
        """
        ...

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor from the other rank, which must have this shape and dtype.

        Raises:
            CommError: the sender is gone, has not come in time, or sent another shape or dtype (shared
                memory always detects that; torch.distributed may see the size only).
        """
        ...

    def flush(self) -> None:
        """Return when all tensors sent have left this process, which may then end.

        Raises:
            CommError: the receiver is gone, or has not come in time.
        """
        ...


def ring_nbytes(capacity: int, num_slots: int = NUM_SLOTS) -> int:
    """The bytes of memory that a `SharedChannel` of this capacity needs."""
    return _PAGE + num_slots * (LINE + _slot_nbytes(capacity, num_slots))


class SharedChannel:
    """A `Channel` between two ranks of one host.

    A tensor takes `ceil(nbytes / (capacity / num_slots))` slots, and one if it is small or empty.

    Args:
        memory: `ring_nbytes(capacity, num_slots)` shared bytes, zeros at first.
        edge: the sending and the receiving rank.
        rank: this one of the two.
        pids: the process ids of both.
        timeout_seconds: how long a send or a receive waits for the other rank's next slot.
        capacity: bytes that it holds.
        num_slots: the number of tensors that it holds.
        num_neighbors: how many ranks share the cores of this host.
    """

    def __init__(
        self,
        memory: Tensor,
        edge: tuple[int, int],
        rank: int,
        pids: tuple[int, int],
        timeout_seconds: float,
        *,
        capacity: int = DEFAULT_CAPACITY,
        num_slots: int = NUM_SLOTS,
        num_neighbors: int = 0,
    ) -> None:
        position = edge.index(rank)
        self._group = Group.of(None, edge, rank)
        self._signals = Signals(
            memory[: 2 * LINE], edge, position, pids, timeout_seconds, num_neighbors
        )
        self._nbytes, self._num_slots = _slot_nbytes(capacity, num_slots), num_slots
        slots = memory[_PAGE : ring_nbytes(capacity, num_slots)].view(
            num_slots, LINE + self._nbytes
        )
        # Each slot of a message begins with a hash of its shape and dtype.
        self._notes = [slot[:8].view(torch.int64) for slot in slots]
        self._slots = [slot[LINE:] for slot in slots]

    def send(self, x: Tensor, *, more: bool = False) -> None:
        """Send `x`; returns when all of it is in the ring, or taken from it."""
        data = _bytes(x)
        note = _note(x.shape, x.dtype)

        def fill(slot: int, low: int, high: int) -> None:
            free = self._signals.count + 1 - self._num_slots
            if self._signals.late(free):
                self._signals.wake()
            self._signals.wait(free)  # the receiver has taken what this slot held
            self._slots[slot][: high - low].copy_(data[low:high])
            self._notes[slot].fill_(note)
            self._signals.arrive(wakes=not more)

        with _naming("send", self._group, data.numel()):
            self._each_slot(data.numel(), fill)

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor; it must have this shape and dtype."""
        result = torch.empty(tuple(shape), dtype=dtype)
        data, note = _bytes(result), _note(shape, dtype)

        def take(slot: int, low: int, high: int) -> None:
            self._signals.wait(self._signals.count + 1)
            if int(self._notes[slot]) != note:
                raise PeerDiffers([self._group.ranks[0]])
            data[low:high].copy_(self._slots[slot][: high - low])
            self._signals.arrive()

        with _naming("recv", self._group, data.numel()):
            self._each_slot(data.numel(), take)
        return result

    def flush(self) -> None:
        """Nothing to do: the ring keeps its bytes when this process ends."""

    def _each_slot(self, nbytes: int, move: Callable[[int, int, int], None]) -> None:
        for low in range(0, max(nbytes, 1), self._nbytes):
            move(self._signals.count % self._num_slots, low, min(low + self._nbytes, nbytes))


class DistributedChannel:
    """A `Channel` on a group of torch.distributed that has these two ranks and this edge only.

    `send` copies and returns, up to `capacity` bytes. Both ends call `meet` once, before anything else.

    Args:
        handle: the group.
        edge: the sending and the receiving rank.
        rank: this one of the two.
        device: where received tensors go.
        capacity: most bytes in flight before `send` waits; a larger tensor goes alone.
    """

    def __init__(
        self,
        handle: dist.ProcessGroup,
        edge: tuple[int, int],
        rank: int,
        device: torch.device,
        *,
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        self._group, self._rank = Group.of(handle, edge, rank), rank
        self._device, self._capacity = device, capacity
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor, *, more: bool = False) -> None:
        """Send `x`; returns when no more than `capacity` bytes are still in flight."""
        data = _bytes(x)
        _, to = self._group.ranks
        with _naming("send", self._group, data.numel()):
            data = data.clone() if data.numel() else data.new_zeros(1)
            self._under_way.append((dist.isend(data, to, group=self._group.handle), data))
            self._settle(self._capacity)

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor; it must have this shape and dtype."""
        result = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        data = _bytes(result) if result.numel() else result.new_zeros(1, dtype=torch.uint8)
        with _naming("recv", self._group, result.nbytes):
            work = dist.irecv(data, self._group.ranks[0], group=self._group.handle)
            assert work is not None
            work.wait()
        return result

    def flush(self) -> None:
        """Return when the receiver has taken all tensors sent."""
        with _naming("send", self._group, sum(data.numel() for _, data in self._under_way)):
            self._settle(0)

    def meet(self) -> None:
        """Connect both ranks.

        The first message of an NCCL group holds the host of each rank until the other comes. Ranks that meet
        at their edges in one order never wait in a circle for that; their schedules give no such order.
        """
        if self._rank == self._group.ranks[0]:
            self.send(torch.zeros(1, dtype=torch.uint8, device=self._device))
            self.flush()
        else:
            self.recv((1,), torch.uint8)

    def _settle(self, nbytes: int) -> None:
        """Wait, oldest first, while more than `nbytes` are in flight, and let go of tensors on a GPU that
        have left; Gloo shows completion only to waits.
        """
        while self._under_way and (
            sum(data.numel() for _, data in self._under_way) > nbytes
            or (self._device.type == "cuda" and self._under_way[0][0].is_completed())
        ):
            self._under_way.popleft()[0].wait()


def _naming(name: str, group: Group, nbytes: int) -> AbstractContextManager[None]:
    source, to = group.ranks
    return naming(name, (f"{source} -> {to}",), nbytes, group)


def _bytes(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _note(shape: Sequence[int], dtype: torch.dtype) -> int:
    return zlib.crc32(f"{tuple(shape)} {dtype}".encode())


def _slot_nbytes(capacity: int, num_slots: int) -> int:
    return max(math.ceil(capacity / num_slots / LINE), 1) * LINE
