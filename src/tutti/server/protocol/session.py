"""A worker's side of the protocol, without sockets: generators of requests to servers.

Each `yield` gives the requests that are due, by server, and gets the replies to all of them. The caller of a
session (`client.Client`, or a test's network) repeats a request, over new connections if needed, until it has
the answer. Requests may arrive twice, since a server acts once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tutti.errors import ServerError
from tutti.server.protocol import messages as m
from tutti.server.protocol.consistency import Consistency
from tutti.server.protocol.keys import VariableBlock, named
from tutti.server.protocol.messages import Refused, Reply, Request, TensorPart
from tutti.server.protocol.update import WEIGHT, add_up

Asking = Generator[dict[int, Request], dict[int, Reply], "Answer"]
Answer = TypeVar("Answer")
_NOTHING = torch.zeros(1, dtype=torch.float64)


class Fenced(Exception):
    """A server has dropped this incarnation: its lease was over, or another has taken its place."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.text)
        self.refused = refused


@dataclass(frozen=True)
class Pushed:
    """The result of a push. `taken`: by all servers; else some may have it, and the worker joined anew."""

    taken: bool
    staleness: int = 0


@dataclass(eq=False)
class Session:
    """One worker's protocol with all servers.

    Args:
        worker: its number.
        blocks: all blocks, in order.
        incarnation: larger than any earlier one of the worker, such as the time.
    """

    worker: int
    num_servers: int
    blocks: tuple[VariableBlock, ...]
    fingerprint: str
    consistency: Consistency
    coupled: bool
    incarnation: int
    clock: int = 0
    sequence: int = 0
    num_workers: int = 0
    settled: int = 0

    @property
    def alone(self) -> bool:
        """Whether the next push is a separate update."""
        return self.consistency.alone(self.clock)

    def join(self, *, again: bool = False) -> Asking[None]:
        """Begin, or begin anew after the lease ended: at one clock on all servers.

        Raises:
            ServerError: the servers run another update, or another process is this worker.
        """
        joined = yield from self._joined(-1, again)
        # a server may give this worker up meanwhile, and let it begin later than requested
        while len(clocks := {reply.clock for reply in joined.values()}) > 1:
            joined = yield from self._joined(max(clocks), again)
        self.clock = max(reply.clock for reply in joined.values())
        self.sequence = max(reply.sequence for reply in joined.values())
        self.num_workers = max(reply.num_workers for reply in joined.values())
        self.settled = min(reply.version for reply in joined.values())

    def pull(
        self,
        keys: Mapping[int, tuple[int, ...]] | None = None,
        rows: Mapping[int, Tensor] | None = None,
        *,
        slot: str = WEIGHT,
        ahead: int = 0,
    ) -> Asking[dict[int, m.Weights]]:
        """Weights for the next clock (or one `ahead` of it), by server: the blocks `keys` of each server, of
        some only the `rows`, by key."""
        while True:
            try:
                yield from self._settle(self.clock)
                replies = yield from self._ask(lambda s: self._pull(s, keys, rows, slot, ahead))
                break
            except Fenced as fenced:
                yield from self._again(fenced)
        return {s: reply for s, reply in replies.items() if isinstance(reply, m.Weights)}

    def push(
        self,
        parts: Mapping[int, TensorPart],
        given: Mapping[str, float],
        versions: Mapping[int, int],
    ) -> Asking[Pushed]:
        """Push a gradient for each key, computed with these `versions` of the servers' weights; when this
        returns, the servers have it."""
        self.sequence += 1
        split = self._split(parts)
        try:
            replies = yield from self._ask(
                lambda s: self._push(split[s], given, versions.get(s, 0))
            )
        except Fenced as fenced:
            yield from self._again(fenced)
            return Pushed(False)
        self.clock += 1
        return Pushed(True, max(r.staleness for r in replies.values() if isinstance(r, m.Done)))

    def load(self, slot: str, parts: Mapping[int, TensorPart]) -> Asking[Pushed]:
        """Replace the values of a slot of some blocks."""
        self.sequence += 1
        split = self._split(parts)
        try:
            yield from self._ask(lambda s: self._load(slot, split[s]))
        except Fenced as fenced:
            yield from self._again(fenced)
            return Pushed(False)
        return Pushed(True)

    def meet(self, number: int) -> Asking[None]:
        """Wait until all remaining workers are at the meeting of this number, whatever their clocks."""
        yield from self.add(f"meeting {number}", _NOTHING, clock=m.MEETING)

    def add(
        self, name: str, values: Tensor, operation: str = "sum", *, clock: int | None = None
    ) -> Asking[Tensor]:
        """The sum of `values` over the workers of this clock; the first server computes it."""
        while True:
            add = m.Add(
                worker=self.worker,
                incarnation=self.incarnation,
                clock=self.clock if clock is None else clock,
                name=name,
                values=values,
                operation=operation,
            )
            try:
                reply = (yield from self._ask_some({0: add}))[0]
            except Fenced as fenced:
                yield from self._again(fenced)
                continue
            assert isinstance(reply, m.Total)
            return reply.values

    def leave(self) -> Asking[None]:
        """End in good order, after all pushes have become updates."""
        try:
            yield from self._settle(self.clock)
            yield from self._ask(
                lambda _: m.Leave(worker=self.worker, incarnation=self.incarnation)
            )
        except Fenced:
            pass  # it has left already

    def _joined(self, clock: int, again: bool) -> Asking[dict[int, m.JoinReply]]:
        """Join all servers, with a later incarnation if one of them has seen this one or a later one."""
        while True:
            replies = yield {s: self._join(clock) for s in range(self.num_servers)}
            fenced = [
                r for r in replies.values() if isinstance(r, Refused) and r.reason == m.FENCED
            ]
            newest = max((r.incarnation for r in fenced), default=0)
            if newest > self.incarnation and again:
                raise self._replaced()
            if not fenced:
                checked = _checked(replies)
                return {s: r for s, r in checked.items() if isinstance(r, m.JoinReply)}
            self.incarnation = max(newest, self.incarnation) + 1

    def _join(self, clock: int) -> Request:
        return m.Join(
            worker=self.worker,
            incarnation=self.incarnation,
            fingerprint=self.fingerprint,
            clock=clock,
        )

    def _again(self, fenced: Fenced) -> Asking[None]:
        """Begin anew after the lease was over.

        Raises:
            Fenced: workers update together: the others have made an update without this one's rows.
        """
        if fenced.refused.incarnation > self.incarnation:
            raise self._replaced()
        if not self.alone:
            raise fenced
        self.incarnation += 1
        yield from self.join(again=True)

    def _replaced(self) -> ServerError:
        return ServerError(
            f"another process has joined as worker {self.worker}",
            why="of two incarnations of a worker only the later one is heard",
            fix="give each worker a number of its own, or start this one again",
        )

    def _settle(self, until: int) -> Asking[None]:
        """Bring the sums of clocks before `until` from all servers to all, if they need them."""
        if not self.coupled or self.num_servers == 1:
            return
        if self.consistency.apart:
            until = min(until, self.consistency.after)
        while self.settled < until:
            clock = self.settled
            replies = yield from self._ask(
                lambda _, c=clock: m.Sums(worker=self.worker, incarnation=self.incarnation, clock=c)
            )
            sums = self._sums([r for r in replies.values() if isinstance(r, m.Partial)])
            yield from self._ask(lambda _, c=clock, x=sums: self._settle_with(c, x))
            self.settled += 1

    def _sums(self, partial: list[m.Partial]) -> Mapping[str, Tensor]:
        """The sums of each variable; the same again if another worker has already sent them to a server."""
        known = [p.settled for p in partial if p.settled is not None]
        if known:
            return known[0]
        return add_up(named(self.blocks, {k: x for p in partial for k, x in p.sums.items()}))

    def _settle_with(self, clock: int, sums: Mapping[str, Tensor]) -> Request:
        return m.Settle(worker=self.worker, incarnation=self.incarnation, clock=clock, sums=sums)

    def _pull(
        self,
        server: int,
        keys: Mapping[int, tuple[int, ...]] | None,
        rows: Mapping[int, Tensor] | None,
        slot: str,
        ahead: int,
    ) -> Request:
        own = {k: x for k, x in (rows or {}).items() if self.blocks[k].server == server}
        return m.Pull(
            worker=self.worker,
            incarnation=self.incarnation,
            clock=self.clock + ahead,
            keys=keys[server] if keys is not None else self._own(server),
            rows=own,
            slot=slot,
        )

    def _own(self, server: int) -> tuple[int, ...]:
        return tuple(block.key for block in self.blocks if block.server == server)

    def _split(self, parts: Mapping[int, TensorPart]) -> list[dict[int, TensorPart]]:
        """By server."""
        split: list[dict[int, TensorPart]] = [{} for _ in range(self.num_servers)]
        for key, part in parts.items():
            split[self.blocks[key].server][key] = part
        return split

    def _load(self, slot: str, parts: Mapping[int, TensorPart]) -> Request:
        return m.Load(
            worker=self.worker,
            incarnation=self.incarnation,
            sequence=self.sequence,
            slot=slot,
            parts=parts,
        )

    def _push(
        self, parts: Mapping[int, TensorPart], given: Mapping[str, float], version: int
    ) -> Request:
        return m.Push(
            worker=self.worker,
            incarnation=self.incarnation,
            sequence=self.sequence,
            clock=self.clock,
            version=version,
            given=given,
            parts=parts,
        )

    def _ask(self, make: Callable[[int], Request]) -> Asking[dict[int, Reply]]:
        return (yield from self._ask_some({s: make(s) for s in range(self.num_servers)}))

    def _ask_some(self, requests: dict[int, Request]) -> Asking[dict[int, Reply]]:
        return _checked((yield requests))


def _checked(replies: dict[int, Reply]) -> dict[int, Reply]:
    """The replies, if none is a refusal.

    Raises:
        Fenced: a server has dropped this incarnation.
        ServerError: a server refuses for good.
    """
    for server, reply in replies.items():
        if isinstance(reply, Refused):
            if reply.reason == m.FENCED:
                raise Fenced(reply)
            raise ServerError(
                f"server {server} refuses: {reply.text}",
                fix="the same script, arguments and checkpoint for all workers and servers",
            )
    return replies
