"""Shows the current call of each rank to ranks of other hosts: a `Board` without shared memory.

An entry travels by a separate asynchronous all-gather. The ranks read it at their next call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NBYTES, TEXT_NBYTES = 2**14, 2**11
_HEAD = struct.Struct("<QII")  # the call, and how many bytes of text and data there are
_NUM_KEPT = 4


class Bulletin:
    """The entries of a group's ranks, as `comm.host.board.Board` has them; `settle` waits for the last ones.

    Args:
        ranks: the group's ranks in its order.
        position: this rank's index among them.
        group: of these ranks alone, for CPU tensors, and used for nothing else.
    """

    def __init__(self, ranks: Sequence[int], position: int, group: dist.ProcessGroup) -> None:
        self.ranks, self.position, self._group = tuple(ranks), position, group
        self.others = [j for j in range(len(ranks)) if j != position]
        self._found: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # by position and call
        self._calls = [0] * len(self.ranks)
        self._latest: dict[tuple[int, int], int] = {}  # by position and number of a step
        self._under_way: tuple[int, Any, list[Tensor], Tensor] | None = None

    def write(self, call: int, text: bytes, data: bytes) -> None:
        """Enter a call with its arguments; all ranks call this equally often."""
        self.settle()
        text, data = text[:TEXT_NBYTES], data[: NBYTES - TEXT_NBYTES - _HEAD.size]
        packed = bytearray(
            (_HEAD.pack(call, len(text), len(data)) + text + data).ljust(NBYTES, b"\0")
        )
        given = torch.frombuffer(packed, dtype=torch.uint8)
        got = [torch.empty_like(given) for _ in self.ranks]
        work = dist.all_gather(got, given, group=self._group, async_op=True)
        self._keep(self.position, call, text, data)
        self._under_way = call, work, got, given

    def settle(self) -> None:
        """Wait for the entries of the last call."""
        if self._under_way is None:
            return
        _, work, got, _ = self._under_way
        self._under_way = None
        work.wait()
        for j in self.others:
            raw: Any = got[j].numpy()
            one = bytes(raw.data)
            call, text, data = _HEAD.unpack_from(one)
            begin = _HEAD.size + text
            self._keep(j, call, one[_HEAD.size : begin], one[begin : begin + data])

    def _keep(self, j: int, call: int, text: bytes, data: bytes) -> None:
        self._found[j, call] = text, data
        self._calls[j] = call
        self._latest[j, call >> 32] = call
        while len(self._found) > _NUM_KEPT * len(self.ranks):
            del self._found[next(iter(self._found))]

    def _entry(self, j: int, call: int) -> tuple[bytes, bytes] | None:
        if self._under_way is not None and self._under_way[1].is_completed():
            self.settle()
        return self._found.get((j, call))

    def has(self, j: int, call: int) -> bool:
        """Whether the entry of the rank at position j for a call is here."""
        return self._entry(j, call) is not None

    def reached(self, j: int, call: int) -> bool:
        """Whether the rank at position j has reached a call, also long ago, as far as it is known here."""
        return self._latest.get((j, call >> 32), 0) >= call

    def data(self, j: int, call: int) -> bytes | None:
        """The arguments of a call on the rank at position j; None until they have arrived."""
        entry = self._entry(j, call)
        return entry[1] if entry is not None else None

    def text(self, j: int, call: int) -> str:
        """The text of the rank at position j for a call; "" where there is none."""
        entry = self._entry(j, call)
        return entry[0].decode(errors="replace") if entry is not None else ""

    def leave(self) -> None:
        """Leave the call; ranks of other hosts do not see it."""

    def fail(self, call: int) -> None:
        """Leave a call half-way; ranks of other hosts do not see it."""

    def now(self, j: int) -> int:
        """The call of the rank at position j at the time of this rank's last call."""
        return self._calls[j] if j == self.position or self._under_way is None else 0

    def failed(self, j: int, since_ns: int) -> int:
        """The call that a rank has left half-way: unknown for ranks of other hosts."""
        return 0

    def ended(self, j: int) -> bool:
        """Whether the process of a rank has ended: collectives detect that."""
        return False
