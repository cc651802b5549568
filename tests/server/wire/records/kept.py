"""A server's machine and its records, without sockets: pushes are put into slabs as a connection does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from server.protocol.updaters import LR, Sgd, cut, whole_state
from tutti.server.protocol import messages as m
from tutti.server.protocol.consistency import parse
from tutti.server.protocol.ledger import Ledger, initial
from tutti.server.protocol.machine import Machine
from tutti.server.protocol.messages import TensorPart
from tutti.server.wire.records.push_segments import Slab
from tutti.server.wire.records.store import Store, room


class Kept:
    """One server of one worker; it goes on from what the directory has."""

    def __init__(self, directory: Path | None, *, start: bool = True, **options: Any) -> None:
        self.blocks = cut(Sgd(), 1)
        own = {b.key: b for b in self.blocks}
        ledger = Ledger(Sgd(), own, initial(own, whole_state(Sgd())), parse("async"), 1)
        nbytes = sum(b.nbytes for b in self.blocks)
        options = {"log_nbytes": 2**14, "identity": {"server": 0}} | options
        self.store = Store(directory, room(nbytes, 2 * len(self.blocks)), **options)
        self.machine = Machine(ledger, self.store.write)
        try:
            for record in self.store.begin(ledger):
                ledger.take(record)
            if start:
                self.store.start(ledger)
        except BaseException:
            self.store.close()
            raise

    @property
    def ledger(self) -> Ledger:
        return self.machine.ledger

    @property
    def state(self) -> dict[tuple[int, str], Tensor]:
        """All numbers, copied."""
        state = self.ledger.state.items()
        return {(k, slot): x.clone() for k, slots in state for slot, x in slots.items()}

    def join(self) -> None:
        join = m.Join(worker=0, incarnation=1, fingerprint="sgd")
        assert isinstance(self.machine.handle(0, join, 0.0)[0][1], m.JoinReply)

    def push(self) -> m.Reply:
        """The next push, of numbers that tell which it is."""
        clock, slab = self.ledger.members[0].clock, self.store.slab()
        parts = {b.key: TensorPart(_placed(slab, 0.5 + clock, b.shape)) for b in self.blocks}
        push = m.Push(
            worker=0,
            incarnation=1,
            sequence=clock + 1,
            clock=clock,
            version=clock,
            given={"lr": LR},
            parts=parts,
        )
        reply = self.machine.handle(0, push, 0.0)[0][1]
        self.store.release(slab, self.ledger)
        if self.store.due():
            self.store.snapshot(self.ledger)
        return reply

    def pushes(self, count: int) -> list[dict[tuple[int, str], Tensor]]:
        """The state before `count` pushes, and after each."""
        found = [self.state]
        for _ in range(count):
            assert isinstance(self.push(), m.Done)
            found.append(self.state)
        return found


def _placed(slab: Slab, value: float, shape: tuple[int, ...]) -> Tensor:
    nbytes = 8 * torch.Size(shape).numel()
    return slab.place(nbytes).view(torch.float64).view(shape).fill_(value)


def same(one: dict[tuple[int, str], Tensor], other: dict[tuple[int, str], Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[k]) for k, x in one.items())
