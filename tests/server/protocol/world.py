"""Workers and servers in a simulated network: time, losses and deaths all follow from one seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from server.protocol.updaters import (
    LR,
    ClippedAdam,
    Sgd,
    cut,
    gradient,
    joined,
    own_numbers,
    whole_state,
)
from tutti.errors import ServerError
from tutti.server.protocol import messages as m
from tutti.server.protocol.consistency import Consistency
from tutti.server.protocol.ledger import Ledger, Record, initial
from tutti.server.protocol.machine import Machine
from tutti.server.protocol.messages import TensorPart
from tutti.server.protocol.session import Fenced, Session

RESEND_SECONDS, SLOW = 0.4, 20.0


@dataclass(frozen=True)
class Faults:
    """What the network does to a message, and who dies when.

    kill_server: (server, number of its record, before or after it is written).
    kill_worker: (worker, number of the reply it gets, whether it comes again).
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.05
    cuts: tuple[tuple[float, float, int, int], ...] = ()  # from, until, worker, server
    slow: tuple[int, ...] = ()  # workers
    kill_server: tuple[int, int, str] | None = None
    kill_worker: tuple[int, int, bool] | None = None


class Killed(Exception):
    """The process ends here."""


@dataclass(eq=False)
class Host:
    """A server's machine, and its disk, which outlives it."""

    disk: list[Record] = field(default_factory=list)
    machine: Machine | None = None
    written: int = 0


@dataclass(eq=False)
class Actor:
    """One life of a worker process."""

    worker: int
    script: Generator[dict[int, m.Request], dict[int, m.Reply], None]
    session: Session
    number: int = -1
    asked: dict[int, m.Request] = field(default_factory=dict)
    got: dict[int, m.Reply] = field(default_factory=dict)
    replies: int = 0
    done: bool = False
    dead: bool = False


class World:
    """Runs until every worker has made `steps` pushes, then all is checked against the logs."""

    def __init__(
        self,
        updater: Sgd | ClippedAdam,
        consistency: Consistency,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        num_workers: int = 2,
        num_servers: int = 1,
        steps: int = 4,
    ) -> None:
        self.updater, self.consistency, self.steps = updater, consistency, steps
        self.faults, self.chance = faults or Faults(), random.Random(seed)
        self.num_workers, self.num_servers = num_workers, num_servers
        self.blocks = cut(updater, num_servers)
        self.now, self._events, self._ids = 0.0, [], itertools.count()
        self._numbers = itertools.count()
        self.made: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}
        self.acknowledged: list[tuple[int, int, int]] = []
        self.kill_server, self.kill_worker = self.faults.kill_server, self.faults.kill_worker
        self.hosts = [Host() for _ in range(num_servers)]
        for server in range(num_servers):
            self._start_server(server)
        self.actors = [self._start_worker(w, 1) for w in range(num_workers)]

    # time

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._ids), action))

    def run(self, limit: float = 600.0) -> None:
        while not all(a.done or a.dead for a in self.actors):
            self.now, _, action = heapq.heappop(self._events)
            assert self.now < limit, [(a.worker, a.asked, a.got) for a in self.actors]
            action()
        for server, host in enumerate(self.hosts):
            if host.machine is None:
                self._start_server(server)

    # network

    def _send(self, worker: int, server: int, action: Callable[[], None]) -> None:
        for begin, end, w, s in self.faults.cuts:
            if begin <= self.now < end and (w, s) == (worker, server):
                return
        slow = SLOW if worker in self.faults.slow else 1.0
        copies = 2 if self.chance.random() < self.faults.duplicate else 1
        for _ in range(copies):
            if self.chance.random() >= self.faults.drop:
                self._at(self.chance.random() * self.faults.delay * slow, action)

    # servers

    def new_machine(self, server: int, journal: Callable[[Record], None]) -> Machine:
        own = {b.key: b for b in self.blocks if b.server == server}
        state = initial(own, whole_state(self.updater))
        ledger = Ledger(self.updater, own, state, self.consistency, self.num_workers)
        return Machine(ledger, journal, num_servers=self.num_servers)

    def _start_server(self, server: int) -> None:
        host = self.hosts[server]
        machine = self.new_machine(server, lambda record: self._write(server, record))
        host.machine = machine
        for record in list(host.disk):
            machine.ledger.take(record)
        self._guarded(server, machine.recover)
        self._at(0.5, lambda: self._tick(server, machine))

    def _write(self, server: int, record: Record) -> None:
        host = self.hosts[server]
        due = self.kill_server is not None and self.kill_server[:2] == (server, host.written)
        host.written += 1
        if due and self.kill_server and self.kill_server[2] == "before":
            raise Killed
        host.disk.append(record)
        if due:
            raise Killed

    def _guarded(self, server: int, action: Callable[[], Any]) -> Any:
        """Whatever the server does; it may die in the middle, and comes back later."""
        try:
            return action()
        except Killed:
            self.hosts[server].machine, self.kill_server = None, None
            self._at(1.0, lambda: self._start_server(server))
            return []

    def _tick(self, server: int, machine: Machine) -> None:
        if self.hosts[server].machine is machine:
            self._answer(server, self._guarded(server, lambda: machine.tick(self.now)))
            self._at(0.5, lambda: self._tick(server, machine))

    def _deliver(self, server: int, actor: Actor, number: int, request: m.Request) -> None:
        machine = self.hosts[server].machine
        if machine is not None:
            source = (actor, number)
            answers = self._guarded(server, lambda: machine.handle(source, request, self.now))
            self._answer(server, answers)

    def _answer(self, server: int, answers: list[tuple[Any, m.Reply]]) -> None:
        for (actor, number), reply in answers:
            if isinstance(reply, m.Weights):  # what is on its way does not change any more
                parts = {k: replace(p, values=p.values.clone()) for k, p in reply.parts.items()}
                machine = self.hosts[server].machine
                if machine is not None:
                    for key, part in reply.parts.items():
                        machine.ledger.give_back(key, part.values)
                reply = replace(reply, parts=parts)

            def arrive(actor: Actor = actor, number: int = number, reply: m.Reply = reply) -> None:
                self._receive(actor, number, server, reply)

            self._send(actor.worker, server, arrive)

    # workers

    def _start_worker(self, worker: int, incarnation: int) -> Actor:
        session = Session(
            worker,
            self.num_servers,
            self.blocks,
            self.updater.fingerprint,
            self.consistency,
            self.updater.coupled,
            incarnation,
        )
        actor = Actor(worker, self._script(session), session)
        self._at(self.chance.random(), lambda: self._go_on(actor, None))
        self._at(1.0, lambda: self._beat(actor))
        return actor

    def _script(self, session: Session) -> Generator[Any, Any, None]:
        yield from session.join()
        taken = 0
        while (taken if self.consistency.bound is None else session.clock) < self.steps:
            pulled = yield from session.pull()
            found = {k: p.values for reply in pulled.values() for k, p in reply.parts.items()}
            versions = {s: reply.version for s, reply in pulled.items()}
            made = gradient(joined(found, self.blocks), session.worker, session.clock)
            mine = (session.worker, session.incarnation, session.sequence + 1)
            self.made[mine] = made
            parts = {b.key: TensorPart(b.of(made[b.variable.name])) for b in self.blocks}
            alone = session.alone
            numbers = own_numbers(self.updater, made, LR) if alone else {"lr": LR}
            result = yield from session.push(parts, numbers, versions)
            if result.taken:
                self.acknowledged.append(mine)
                taken += 1
        yield from session.leave()

    def _go_on(self, actor: Actor, replies: dict[int, m.Reply] | None) -> None:
        if actor.dead:
            return
        try:
            actor.asked = actor.script.send(replies)  # type: ignore[arg-type]
        except StopIteration:
            actor.done = True
            return
        except Fenced:  # it was given up while workers update together
            actor.dead = True
            return
        except ServerError:  # its last life has pushed to some servers only
            assert self.consistency == Consistency() and actor.session.incarnation > 1
            self._stop()
            return
        actor.got, actor.number = {}, next(self._numbers)
        self._ask(actor, actor.number)

    def _ask(self, actor: Actor, number: int) -> None:
        """Send what is not answered, and again after a while."""
        if actor.dead or actor.done or actor.number != number:
            return
        for server, request in actor.asked.items():
            if server not in actor.got:
                self._request(actor, server, number, request)
        self._at(RESEND_SECONDS, lambda: self._ask(actor, number))

    def _request(self, actor: Actor, server: int, number: int, request: m.Request) -> None:
        self._send(actor.worker, server, lambda: self._deliver(server, actor, number, request))

    def _beat(self, actor: Actor) -> None:
        if actor.dead or actor.done:
            return
        beat = m.Beat(worker=actor.worker, incarnation=actor.session.incarnation)
        for server in range(self.num_servers):
            self._request(actor, server, -2, beat)
        self._at(1.0, lambda: self._beat(actor))

    def _receive(self, actor: Actor, number: int, server: int, reply: m.Reply) -> None:
        if actor.dead or actor.done or number != actor.number or server in actor.got:
            return
        if self.kill_worker and self.kill_worker[:2] == (actor.worker, actor.replies):
            self._kill(actor, self.kill_worker[2])
            return
        actor.replies += 1
        actor.got[server] = reply
        if len(actor.got) == len(actor.asked):
            self._go_on(actor, actor.got)

    def _kill(self, actor: Actor, again: bool) -> None:
        actor.dead, self.kill_worker = True, None
        if not again and not self.consistency.apart:
            self._stop()
        elif again:
            self.actors.append(self._start_worker(actor.worker, actor.session.incarnation + 1))

    @property
    def finished(self) -> bool:
        """Whether the last life of every worker has made all of its steps."""
        last = {a.worker: a for a in self.actors}
        return all(a.done for a in last.values())

    def _stop(self) -> None:
        """As the launcher, or a server, does when a worker is lost that the others need."""
        for actor in self.actors:
            actor.dead = True
