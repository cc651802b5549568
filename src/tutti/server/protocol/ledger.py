"""A server's durable state, event-sourced: every change is a record, applied in order.

    Ledger(initial) --take(record)--> ... --take(record)--> Ledger

`take` is deterministic: the same records give the same bits. So a log of records, or a snapshot and the
records since, restores the state. This module uses no clock, socket or file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tutti.server.protocol.consistency import Consistency
from tutti.server.protocol.gradient_sums import by_row, summed, summed_rows
from tutti.server.protocol.keys import VariableBlock
from tutti.server.protocol.messages import MEETING, Add, Done, Load, Push, TensorPart
from tutti.server.protocol.predict import BEFORE, hold, smoothed
from tutti.server.protocol.update import WEIGHT, Updater


@dataclass(frozen=True, eq=False)
class Entered:
    """A worker's incarnation begins at a clock."""

    worker: int
    incarnation: int
    clock: int


@dataclass(frozen=True, eq=False)
class Departed:
    """A worker left, or its lease ended."""

    worker: int
    incarnation: int


@dataclass(frozen=True, eq=False)
class JoiningEnded:
    """The wait for workers that have not joined is over."""


@dataclass(frozen=True, eq=False)
class Closed:
    """A clock's gradients (`name` "") or one of its small sums are complete: the workers that count."""

    clock: int
    name: str
    workers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Applied:
    """The update of a clock, with the sums of each variable, from which its scalars follow."""

    clock: int
    sums: Mapping[str, Tensor]


Record = Entered | Departed | JoiningEnded | Closed | Applied | Push | Load | Add


@dataclass(frozen=True)
class KnownWorker:
    """The server's record of a worker.

    clock: of its next push.  sequence: of its last push.  answer: to that push.
    """

    incarnation: int
    clock: int
    active: bool = True
    sequence: int = 0
    answer: Done | None = None


# Blocks by key, each with its weight and slots.
State = dict[int, dict[str, Tensor]]


@dataclass(eq=False)
class Ledger:
    """One server's state.

    blocks: the owned blocks, by key.
    pending: pushes of clocks not applied yet, by clock and worker.
    added: parts of small sums, by (clock, name) and worker.
    settled: the sums of the last common update; no server is more than one such update ahead of another.
    numbers: of the last update.
    lag: the mean number of updates between a pull and its push, under `predict`.
    closed: the workers that count, by (clock, name); the name "" stands for the gradients.
    meetings: how many sums of `MEETING` are closed.
    borrowed: the number of readers of a block's tensors; with any, a change copies the block first.
    """

    updater: Updater
    blocks: Mapping[int, VariableBlock]
    state: State
    consistency: Consistency
    num_workers: int
    version: int = 0
    begun: bool = False
    members: dict[int, KnownWorker] = field(default_factory=dict)
    pending: dict[int, dict[int, Push]] = field(default_factory=dict)
    added: dict[tuple[int, str], dict[int, Add]] = field(default_factory=dict)
    closed: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    meetings: int = 0
    settled: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    borrowed: Counter[int] = field(default_factory=Counter)
    lag: float = field(init=False)

    def __post_init__(self) -> None:
        self.lag = float(self.num_workers - 1)
        if self.consistency.predict:
            for slots in self.state.values():
                slots[BEFORE] = slots[WEIGHT].clone()

    def take(self, record: Record) -> None:
        """Apply the next record, which its maker has checked."""
        _TAKE[type(record)](self, record)

    @property
    def started(self) -> bool:
        """Whether all workers have joined, or the wait for them is over: no clock ends before."""
        return self.begun or len(self.members) >= self.num_workers

    def active(self) -> dict[int, KnownWorker]:
        """The present workers."""
        return {w: m for w, m in self.members.items() if m.active}

    def gone(self) -> list[int]:
        """The workers that are not present and that nobody waits for."""
        here = self.active()
        away = [w for w in range(self.num_workers) if w not in here]
        return [w for w in away if w in self.members or self.started]

    def missed(self) -> list[int]:
        """The workers that have left before an update which the others then made together without them."""
        return [
            worker
            for worker, x in sorted(dict(self.members).items())
            if not x.active and x.clock < self.version and not self.consistency.alone(x.clock)
        ]

    @property
    def alone(self) -> bool:
        """Whether each push is now a separate update; once true it stays true."""
        return self.consistency.alone(self.version)

    @property
    def predicts(self) -> bool:
        """Whether workers get predicted weights; common updates give no estimate for separate ones."""
        return self.consistency.predict and self.alone and self.version > self.consistency.after

    @property
    def floor(self) -> int:
        """The first clock whose updates are not all made."""
        if not self.alone:
            return self.version
        return min((x.clock for x in self.active().values()), default=0) if self.started else 0

    def first_clock(self, worker: int) -> int:
        """The first clock of a joining worker: the minimum, but after its earlier pushes.

        A clock closes as soon as all have pushed for it, so the minimum is the first open one.
        """
        if self.alone:
            others = (x.clock for w, x in self.active().items() if w != worker)
            return min(others, default=self.consistency.after)
        clock = self.version
        while worker in self.pending.get(clock, ()) or (clock, "") in self.closed:
            clock += 1
        return clock

    def total(self, clock: int, name: str) -> Tensor:
        """A closed small sum, added in the order of workers, scaled for missing ones."""
        workers, parts = self.closed[clock, name], self.added[clock, name]
        stacked = torch.stack([parts[worker].values for worker in workers])
        operation = parts[workers[0]].operation
        if operation != "sum":
            return stacked.amax(0) if operation == "max" else stacked.amin(0)
        total = stacked[0]
        for x in stacked[1:]:
            total = total + x
        return total if len(workers) == self.num_workers else total * self._scale(workers)

    def sums(self, clock: int) -> dict[int, Tensor]:
        """The sums of each block over the gradients of a closed clock."""
        gradients = ((key, self._gradient(clock, key)) for key in sorted(self.blocks))
        return {
            key: self.updater.sums(self.blocks[key].variable.name, gradient)
            for key, gradient in gradients
        }

    def lend(self, key: int, slot: str) -> Tensor:
        """A tensor of the state, unchanged until `give_back`."""
        self.borrowed[key] += 1
        return self.state[key][slot]

    def give_back(self, key: int, x: Tensor) -> None:
        """End a loan; the loan of a tensor that the state has since replaced does not matter."""
        if any(x is own for own in self.state[key].values()):
            self.borrowed[key] -= 1

    def _scale(self, workers: tuple[int, ...]) -> float:
        return self.num_workers / len(workers) if workers else 1.0

    def _enter(self, record: Entered) -> None:
        known = self.members.get(record.worker)
        if known and known.incarnation == record.incarnation:
            self.members[record.worker] = replace(known, clock=record.clock)
        else:
            self.members[record.worker] = KnownWorker(record.incarnation, record.clock)

    def _begin(self, record: JoiningEnded) -> None:
        self.begun = True

    def _depart(self, record: Departed) -> None:
        self.members[record.worker] = replace(self.members[record.worker], active=False)

    def _push(self, push: Push) -> None:
        member = self.members[push.worker]
        if self.alone:
            staleness = self.version - push.version
            self.lag = smoothed(self.lag, staleness, self.num_workers)
            self._apply_alone(push, max(1, staleness) if self.consistency.damped else 1)
        else:
            staleness = push.clock - push.version
            self.pending.setdefault(push.clock, {})[push.worker] = push
        self.staleness[staleness] += 1
        answer = Done(version=self.version, sequence=push.sequence, staleness=staleness)
        self.members[push.worker] = replace(
            member, clock=push.clock + 1, sequence=push.sequence, answer=answer
        )

    def _apply_alone(self, push: Push, damping: int) -> None:
        rates = self.updater.rates if damping > 1 else ()
        scalars = {n: x / damping if n in rates else x for n, x in push.given.items()}
        for key, block in self.blocks.items():
            if self.consistency.predict:
                self._detach(key)
                hold(self.state[key])
            self._update(key, [push.parts[key]] if key in push.parts else [], 1.0, scalars, block)
        self.version, self.numbers = self.version + 1, scalars

    def _load(self, load: Load) -> None:
        for key, part in load.parts.items():
            self._detach(key)
            self.state[key][load.slot].copy_(part.plain(part.values.dtype))
            if load.slot == WEIGHT and self.consistency.predict:
                hold(self.state[key])
        answer = Done(version=self.version, sequence=load.sequence)
        member = self.members[load.worker]
        self.members[load.worker] = replace(member, sequence=load.sequence, answer=answer)

    def _add(self, add: Add) -> None:
        self.added.setdefault((add.clock, add.name), {})[add.worker] = add

    def _close(self, record: Closed) -> None:
        now = record.clock, record.name
        self.closed[now] = record.workers
        if record.clock == MEETING:  # whoever has come to this one has left the last one
            self.meetings += 1
            for table in (self.added, self.closed):
                for old in [k for k in table if k[0] == MEETING and k != now]:
                    del table[old]

    def _apply(self, record: Applied) -> None:
        workers = self.closed[record.clock, ""]
        if workers:
            self._apply_together(record, workers)
        self.version, self.settled = record.clock + 1, record.sums
        self.pending.pop(record.clock, None)
        for table in (self.added, self.closed):
            for clock, name in [k for k in table if k[0] < self.version]:
                del table[clock, name]

    def _detach(self, key: int) -> None:
        """Before a block changes: leave lent tensors to their readers, and continue with a copy."""
        if self.borrowed[key]:
            self.state[key] = {slot: x.clone() for slot, x in self.state[key].items()}
            del self.borrowed[key]

    def _apply_together(self, record: Applied, workers: tuple[int, ...]) -> None:
        pushes = [self.pending[record.clock][w] for w in workers]
        self.numbers = dict(self.updater.scalars(record.sums, pushes[0].given))
        scale = self._scale(workers)
        for key, block in self.blocks.items():
            parts = [push.parts[key] for push in pushes if key in push.parts]
            self._update(key, parts, scale, self.numbers, block)

    def _gradient(self, clock: int, key: int) -> Tensor:
        """The sum over a closed clock's workers, in their order."""
        workers, block = self.closed[clock, ""], self.blocks[key]
        pushes = [self.pending[clock][w] for w in workers]
        parts = [push.parts[key] for push in pushes if key in push.parts]
        return summed(parts, block, self._scale(workers))

    def _update(
        self,
        key: int,
        parts: list[TensorPart],
        scale: float,
        scalars: Mapping[str, float],
        block: VariableBlock,
    ) -> None:
        """Update one block in place; of a lazy one only the pushed rows."""
        name = block.variable.name
        if block.variable.lazy and not parts:
            return
        self._detach(key)
        state = self.state[key]
        if not (block.variable.lazy and all(p.rows is not None for p in parts)):
            self.updater.update(name, state, summed(parts, block, scale), scalars)
            return
        rows, gradient = summed_rows(parts, block, scale)
        some = {slot: x[rows] if by_row(x, block) else x for slot, x in state.items()}
        self.updater.update(name, some, gradient, scalars)
        for slot, x in state.items():
            if by_row(x, block):
                x[rows] = some[slot]


def initial(
    blocks: Mapping[int, VariableBlock], whole: Mapping[str, Mapping[str, Tensor]]
) -> State:
    """The state of some blocks, copied from whole variables."""
    return {
        key: {
            slot: block.of(x.detach().contiguous()).clone()
            for slot, x in whole[block.variable.name].items()
        }
        for key, block in blocks.items()
    }


_TAKE: dict[type, Callable[[Ledger, Any], None]] = {
    Entered: Ledger._enter,
    Departed: Ledger._depart,
    JoiningEnded: Ledger._begin,
    Closed: Ledger._close,
    Applied: Ledger._apply,
    Push: Ledger._push,
    Load: Ledger._load,
    Add: Ledger._add,
}
