"""Every world of a few pushes: all orders, losses, doubles and crashes of workers and servers, breadth first.

    python -m benchmarks.small_worlds --sync async --workers 2 --servers 1 --pushes 1 --drops 1 --doubles 1 \
        --server-crashes 1 --worker-crashes 1

The code that is searched is the code that runs: `Session` and `Machine`, a machine's recovery from its
records, without sockets and files. A state is what machines, workers and the network hold; each is visited
once. From each state every step is taken:

    deliver    any message in flight, in any order; a server may be killed after each record that it writes
    send again a request of which nothing is in flight, as a worker does after a while
    faults     drop or double a message, kill a server or a worker, end a lease: so many of each in all

A worker that was killed comes again with a new incarnation; its requests may still arrive. A server that was
killed goes on from its records. In each state is asserted: a push is written down once, and is in the
weights as often as the records say; an acknowledged push is written down; what records give is what the
machine holds; clocks and versions do not go back. In the end: from each state the workers can finish without
another fault.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from hashlib import blake2b
from types import FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor

from benchmarks.command_line import parser
from tutti.server.protocol import messages as m
from tutti.server.protocol.consistency import Consistency, parse
from tutti.server.protocol.keys import VariableBlock, blocks
from tutti.server.protocol.ledger import Applied, Closed, Ledger, Record, initial
from tutti.server.protocol.machine import Machine
from tutti.server.protocol.messages import Push, TensorPart
from tutti.server.protocol.session import Fenced, Session
from tutti.server.protocol.update import WEIGHT, ServedVariable

# Each push adds a power of this to the weights: digits say how often it counts.
_BASE = 4
_MOST_SEQUENCES, _MOST_INCARNATIONS = 3, 4


class Violation(AssertionError):
    """A state that must not be, and the steps that lead to it."""


class Digits:
    """w <- w + g, on one number for each server."""

    given: tuple[str, ...] = ("lr",)
    numbers: tuple[str, ...] = ("lr",)
    rates: tuple[str, ...] = ()

    def __init__(self, num_servers: int, *, coupled: bool = False) -> None:
        self.coupled, self.fingerprint = coupled, f"digits of {num_servers}"
        names, found = (f"v{k}" for k in range(1000)), dict[int, ServedVariable]()
        while len(found) < num_servers:  # places are hashed: take one name for each server
            variable = ServedVariable(name=next(names), shape=(1,), dtype=torch.float64)
            found.setdefault(blocks((variable,), num_servers)[0].server, variable)
        self.variables = tuple(found[s] for s in range(num_servers))

    def sums(self, variable: str, gradient: Tensor) -> Tensor:
        """The gradient itself."""
        return gradient.double().clone()

    def scalars(
        self, sums: Mapping[str, Tensor], given: Mapping[str, float]
    ) -> Mapping[str, float]:
        """As they came."""
        return {"lr": given["lr"]}

    def update(
        self,
        variable: str,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        scalars: Mapping[str, float],
    ) -> None:
        """One block, in place."""
        state[WEIGHT].add_(gradient)


def digit(worker: int, incarnation: int, sequence: int) -> float:
    """What a push adds."""
    assert sequence <= _MOST_SEQUENCES and incarnation <= _MOST_INCARNATIONS, "too large a world"
    place = (worker * _MOST_INCARNATIONS + incarnation - 1) * _MOST_SEQUENCES + sequence - 1
    return float(_BASE**place)


@dataclass(frozen=True)
class Bounds:
    """The size of a world, and how many faults of each kind it has at most."""

    sync: str = "async"
    workers: int = 2
    servers: int = 1
    pushes: int = 1
    coupled: bool = False
    drops: int = 0
    doubles: int = 0
    server_crashes: int = 0
    worker_crashes: int = 0
    leases: int = 0

    @property
    def faults(self) -> tuple[int, ...]:
        """How many are left at the beginning: drops, doubles, server crashes, worker crashes, leases."""
        return (
            self.drops,
            self.doubles,
            self.server_crashes,
            self.worker_crashes,
            self.leases,
        )


DROP, DOUBLE, SERVER, WORKER, LEASE = range(5)


class Killed(Exception):
    """The process ends here."""


@dataclass(frozen=True, eq=False)
class Life:
    """One life of a worker: all replies that it has had make it what it is.

    number: of its question.  asked: by server.  got: the replies so far.
    """

    worker: int
    incarnation: int
    history: tuple[dict[int, m.Reply], ...]
    session: Session
    script: Generator[Any, Any, None]
    acknowledged: frozenset[tuple[int, int, int]]
    asked: Mapping[int, m.Request]
    got: Mapping[int, m.Reply]
    done: bool

    @property
    def number(self) -> int:
        """Of its question."""
        return len(self.history)

    @cached_property
    def key(self) -> Any:
        """Equal for lives that go on alike."""
        own = canonical(self.session), _frames(self.script), canonical(self.got)
        return self.worker, self.incarnation, self.number, self.done, _short(own)


@dataclass(frozen=True, eq=False)
class Host:
    """A server's machine and its records."""

    machine: Machine
    disk: tuple[Record, ...]

    @cached_property
    def ledger(self) -> Any:
        """The canonical form of the machine's ledger."""
        return canonical(self.machine.ledger)

    @cached_property
    def key(self) -> Any:
        """Equal for servers that go on alike."""
        waiting = [(source, canonical(r)) for source, r in self.machine._waiting]
        return _short((self.ledger, waiting))


@dataclass(frozen=True, eq=False)
class Letter:
    """A message in flight, between a life and a server; `number` of the question."""

    worker: int
    incarnation: int
    number: int
    server: int
    content: Any

    @cached_property
    def key(self) -> Any:
        """Equal for messages that are alike."""
        own = (self.worker, self.incarnation, self.number, self.server, canonical(self.content))
        return _short(own)

    @property
    def is_reply(self) -> bool:
        """Whether it goes to the worker."""
        return not isinstance(self.content, m.Request)


@dataclass(frozen=True, eq=False)
class State:
    """The world at one moment."""

    hosts: tuple[Host, ...]
    lives: tuple[Life, ...]
    letters: tuple[Letter, ...]
    faults: tuple[int, ...]
    acknowledged: frozenset[tuple[int, int, int]]

    @cached_property
    def key(self) -> bytes:
        """Equal for states that go on alike."""
        letters = sorted(x.key for x in self.letters)
        own = (
            tuple(h.key for h in self.hosts),
            tuple(x.key for x in self.lives),
            tuple(letters),
            self.faults,
            tuple(sorted(self.acknowledged)),
        )
        return _short(own)

    @property
    def final(self) -> bool:
        """Whether all workers have ended."""
        return all(x.done for x in self.lives)

    def spent(self, fault: int) -> tuple[int, ...]:
        """The faults that are left after one."""
        return tuple(n - (k == fault) for k, n in enumerate(self.faults))


class Worlds:
    """All states of the worlds within `bounds`."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.updater = Digits(bounds.servers, coupled=bounds.coupled)
        self.consistency: Consistency = parse(bounds.sync)
        self.blocks: tuple[VariableBlock, ...] = blocks(self.updater.variables, bounds.servers)

    # the beginning

    def first(self) -> State:
        """Servers without records, and workers that have asked to join."""
        hosts = tuple(self._recovered(server, ()) for server in range(self.bounds.servers))
        lives = tuple(self._life(worker, 1, ()) for worker in range(self.bounds.workers))
        letters = tuple(x for life in lives for x in self._questions(life))
        return State(hosts, lives, letters, self.bounds.faults, frozenset())

    def _machine(self, server: int) -> Machine:
        own = {b.key: b for b in self.blocks if b.server == server}
        whole = {v.name: {WEIGHT: torch.zeros(1, dtype=v.dtype)} for v in self.updater.variables}
        ledger = Ledger(
            self.updater, own, initial(own, whole), self.consistency, self.bounds.workers
        )
        return Machine(ledger, _nowhere, num_servers=self.bounds.servers)

    def _recovered(self, server: int, disk: tuple[Record, ...]) -> Host:
        """A server that starts with these records."""
        machine = self._machine(server)
        for record in disk:
            machine.ledger.take(record)
        written: list[Record] = []
        machine.journal = written.append
        machine.recover()
        machine.journal = _nowhere
        return Host(machine, disk + tuple(written))

    def _life(self, worker: int, incarnation: int, history: tuple[dict[int, m.Reply], ...]) -> Life:
        """A worker that has had these replies."""
        session = Session(
            worker,
            self.bounds.servers,
            self.blocks,
            self.updater.fingerprint,
            self.consistency,
            self.updater.coupled,
            incarnation,
        )
        taken: list[tuple[int, int, int]] = []
        script, asked, done = self._script(session, taken), {}, False
        try:
            asked = next(script)
            for replies in history:
                asked = script.send(replies)
        except (StopIteration, Fenced):  # one that was given up while workers update together ends
            asked, done = {}, True
        acknowledged = frozenset(taken)
        return Life(worker, incarnation, history, session, script, acknowledged, asked, {}, done)

    def _script(
        self, session: Session, taken: list[tuple[int, int, int]]
    ) -> Generator[Any, Any, None]:
        yield from session.join()
        while (
            len(taken) if self.consistency.bound is None else session.clock
        ) < self.bounds.pushes:
            pulled = yield from session.pull()
            versions = {s: reply.version for s, reply in pulled.items()}
            del pulled
            mine = (session.worker, session.incarnation, session.sequence + 1)
            parts = {
                b.key: TensorPart(torch.full((1,), digit(*mine), dtype=torch.float64))
                for b in self.blocks
            }
            result = yield from session.push(parts, {"lr": 1.0}, versions)
            if result.taken:
                taken.append(mine)
        yield from session.leave()

    def _questions(self, life: Life) -> list[Letter]:
        own = (life.worker, life.incarnation, life.number)
        return [Letter(*own, server, request) for server, request in life.asked.items()]

    # steps

    def steps(self, state: State) -> Iterator[tuple[str, bool, State]]:
        """What it is, whether it is a fault, and the state after it."""
        seen = set()
        for at, letter in enumerate(state.letters):
            if letter.key in seen:
                continue
            seen.add(letter.key)
            rest = state.letters[:at] + state.letters[at + 1 :]
            yield from self._delivered(replace(state, letters=rest), letter)
            if state.faults[DROP]:
                yield (
                    f"lose {_told(letter)}",
                    True,
                    replace(state, letters=rest, faults=state.spent(DROP)),
                )
            if state.faults[DOUBLE]:
                yield (
                    f"double {_told(letter)}",
                    True,
                    replace(state, letters=(*state.letters, letter), faults=state.spent(DOUBLE)),
                )
        yield from self._again(state)
        yield from self._crashes(state)

    def _delivered(self, state: State, letter: Letter) -> Iterator[tuple[str, bool, State]]:
        name = _told(letter)
        if letter.is_reply:
            yield name, False, self._received(state, letter)
            return
        source = (letter.worker, letter.incarnation, letter.number)
        yield from self._act(
            state, letter.server, name, lambda x: x.handle(source, letter.content, 0.0)
        )

    def _act(
        self, state: State, server: int, name: str, action: Callable[[Machine], list[Any]]
    ) -> Iterator[tuple[str, bool, State]]:
        """What a server does; it may be killed after each record that it writes."""
        host = state.hosts[server]
        machine, written = forked(host.machine), list[Record]()
        machine.journal = written.append
        answers = action(machine)
        machine.journal = _nowhere
        found = _with_host(state, server, Host(machine, host.disk + tuple(written)))
        yield name, False, self._answered(found, server, answers)
        for count in range(1, len(written) + 1) if state.faults[SERVER] else ():
            again = self._recovered(server, host.disk + tuple(written[:count]))
            after = _with_host(state, server, again)
            label = f"{name}, and server {server} is killed after record {count} of it"
            yield label, True, replace(after, faults=state.spent(SERVER))

    def _answered(self, state: State, server: int, answers: list[Any]) -> State:
        letters = list(state.letters)
        for (worker, incarnation, number), reply in answers:
            if isinstance(reply, m.Weights):
                state.hosts[server].machine.returned(reply)
                parts = {k: replace(p, values=p.values.clone()) for k, p in reply.parts.items()}
                reply = replace(reply, parts=parts)
            life = state.lives[worker]
            wanted = (incarnation, number) == (life.incarnation, life.number)
            if wanted and server not in life.got:  # nobody reads another one
                letters.append(Letter(worker, incarnation, number, server, reply))
        return replace(state, letters=tuple(letters))

    def _received(self, state: State, letter: Letter) -> State:
        life = state.lives[letter.worker]
        got = {**life.got, letter.server: letter.content}
        if len(got) < len(life.asked):
            after = replace(life, got=got)
            letters = state.letters
        else:
            after = self._life(life.worker, life.incarnation, (*life.history, got))
            letters = (*state.letters, *self._questions(after))
        letters = tuple(x for x in letters if not (x.is_reply and _stale(x, after)))
        _check_life(life, after)
        lives = tuple(after if x is life else x for x in state.lives)
        acknowledged = state.acknowledged | after.acknowledged
        return replace(state, lives=lives, letters=letters, acknowledged=acknowledged)

    def _again(self, state: State) -> Iterator[tuple[str, bool, State]]:
        for life in state.lives:
            for letter in self._questions(life):
                own = (letter.worker, letter.incarnation, letter.number)
                waits = any(s == own for s, _ in state.hosts[letter.server].machine._waiting)
                there = any(
                    (x.worker, x.incarnation, x.number, x.server) == (*own, letter.server)
                    for x in state.letters
                )
                if letter.server not in life.got and not there and not waits:
                    after = replace(state, letters=(*state.letters, letter))
                    yield f"send {_told(letter)} again", False, after

    def _crashes(self, state: State) -> Iterator[tuple[str, bool, State]]:
        for server, host in enumerate(state.hosts) if state.faults[SERVER] else ():
            again = self._recovered(server, host.disk)
            after = replace(_with_host(state, server, again), faults=state.spent(SERVER))
            yield f"server {server} is killed", True, after
        for life in state.lives:
            if life.done:
                continue
            if state.faults[WORKER]:
                yield f"worker {life.worker} is killed", True, self._reborn(state, life)
            for server in range(self.bounds.servers) if state.faults[LEASE] else ():
                member = state.hosts[server].machine.ledger.members.get(life.worker)
                if member is None or not member.active:
                    continue
                spent = replace(state, faults=state.spent(LEASE))
                for name, _, after in self._act(
                    spent,
                    server,
                    f"the lease of worker {life.worker} ends on server {server}",
                    lambda x, w=life.worker: _expired(x, w),
                ):
                    yield name, True, after

    def _reborn(self, state: State, life: Life) -> State:
        """A new life, of a later time than the session's own incarnations."""
        incarnation = max(life.incarnation, life.session.incarnation) + 1
        after = self._life(life.worker, incarnation, ())
        lives = tuple(after if x is life else x for x in state.lives)
        kept = tuple(x for x in state.letters if not (x.is_reply and x.worker == life.worker))
        letters = (*kept, *self._questions(after))
        return replace(state, lives=lives, letters=letters, faults=state.spent(WORKER))

    # what must hold

    def check(self, before: State | None, state: State) -> None:
        """Raise `Violation` if `state`, which follows `before`, must not be."""
        for server, host in enumerate(state.hosts):
            if before is not None and before.hosts[server] is host:
                continue
            self._check_host(server, host)
            if before is not None:
                _check_forward(before.hosts[server], host)
        for host in state.hosts:
            missing = state.acknowledged - set(_pushes(host.disk))
            _need(not missing, f"acknowledged, and not written down: {sorted(missing)}")

    def _check_host(self, server: int, host: Host) -> None:
        counted = Counter(_pushes(host.disk))
        _need(max(counted.values(), default=0) <= 1, f"written down twice: {counted}")
        ledger = host.machine.ledger
        expected = self._expected(host.disk)
        for slots in ledger.state.values():
            _need(
                slots[WEIGHT].item() == expected,
                f"server {server} has the weight {slots[WEIGHT].item():g}, its records make {expected:g}",
            )
        again = self._machine(server).ledger
        for record in host.disk:
            again.take(record)
        _need(
            canonical(again) == host.ledger, f"the records of server {server} give another ledger"
        )

    def _expected(self, disk: tuple[Record, ...]) -> float:
        """The sum that the records stand for, worked out beside the ledger."""
        total, given = 0.0, dict[tuple[int, int], float]()
        closed, version = dict[int, tuple[int, ...]](), 0
        for record in disk:
            if isinstance(record, Push):
                value = digit(record.worker, record.incarnation, record.sequence)
                if self.consistency.alone(version):
                    total, version = total + value, version + 1
                else:
                    _need((record.clock, record.worker) not in given, "two pushes for one clock")
                    given[record.clock, record.worker] = value
            elif isinstance(record, Closed) and not record.name:
                _need(record.clock not in closed, f"clock {record.clock} is closed twice")
                closed[record.clock] = record.workers
            elif isinstance(record, Applied):
                _need(record.clock == version, f"clock {record.clock} is applied at {version}")
                workers = closed[record.clock]
                scale = self.bounds.workers / len(workers) if workers else 1.0
                total += scale * sum(given[record.clock, w] for w in workers)
                version += 1
        return total


@dataclass(frozen=True)
class Count:
    """What a search has seen."""

    states: int
    steps: int
    finals: int
    depth: int
    complete: bool


def search(bounds: Bounds, *, most: int | None = None, seconds: float | None = None) -> Count:
    """Visit every state, or as many as are allowed.

    Raises:
        Violation: one must not be, or the workers cannot finish from it; the steps that lead there are told.
    """
    worlds = Worlds(bounds)
    first = worlds.first()
    worlds.check(None, first)
    known: dict[bytes, int] = {first.key: 0}
    came: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]  # from where a step that is no fault leads here
    depths, finals, steps = [0], [0] if first.final else [], 0
    waiting: deque[tuple[int, State]] = deque([(0, first)])
    end = time.monotonic() + seconds if seconds is not None else None
    while waiting:
        if (most is not None and len(known) >= most) or (end and time.monotonic() > end):
            return Count(len(known), steps, len(finals), max(depths), False)
        at, state = waiting.popleft()
        name = ""
        try:
            for name, fault, after in worlds.steps(state):
                steps += 1
                to = known.get(after.key)
                if to is None:
                    worlds.check(state, after)
                    to = known[after.key] = len(came)
                    came.append((at, name))
                    back.append([])
                    depths.append(depths[at] + 1)
                    waiting.append((to, after))
                    if after.final:
                        finals.append(to)
                if not fault:
                    back[to].append(at)
        except Violation as error:
            raise Violation(_path(came, at, [name, str(error)])) from error
    _check_ends(back, finals, came)
    return Count(len(known), steps, len(finals), max(depths), True)


def _check_ends(back: list[list[int]], finals: list[int], came: list[tuple[int, str]]) -> None:
    """From each state the workers finish, if nothing goes wrong any more."""
    reached, stack = set(finals), list(finals)
    while stack:
        for before in back[stack.pop()]:
            if before not in reached:
                reached.add(before)
                stack.append(before)
    stuck = [k for k in range(len(came)) if k not in reached]
    if stuck:
        raise Violation(
            _path(came, stuck[0], [f"from here, as from {len(stuck)} states, no end is reached"])
        )


def _path(came: list[tuple[int, str]], at: int, more: list[str]) -> str:
    names = []
    while at > 0:
        at, name = came[at]
        names.append(name)
    return "\n".join([*reversed(names), *more])


def _need(condition: bool, text: str) -> None:
    if not condition:
        raise Violation(text)


def _check_life(before: Life, after: Life) -> None:
    forward = after.session.clock >= before.session.clock
    # one that was given up begins anew at the minimum of the others
    joins = any(isinstance(x, m.Join) for x in before.asked.values())
    _need(forward or joins, f"the clock of worker {after.worker} goes back")


def _check_forward(before: Host, after: Host) -> None:
    old, new = before.machine.ledger, after.machine.ledger
    _need(new.version >= old.version, "a server's version goes back")
    for worker, member in old.members.items():
        now = new.members.get(worker)
        _need(now is not None, f"worker {worker} is forgotten")
        assert now is not None
        _need(now.incarnation >= member.incarnation, "an earlier incarnation comes back")
        same = now.incarnation == member.incarnation
        _need(not same or now.clock >= member.clock, f"the clock of worker {worker} goes back")
        _need(not same or now.sequence >= member.sequence, "a sequence goes back")


def _pushes(disk: tuple[Record, ...]) -> list[tuple[int, int, int]]:
    return [(r.worker, r.incarnation, r.sequence) for r in disk if isinstance(r, Push)]


def _expired(machine: Machine, worker: int) -> list[Any]:
    machine._leases[worker] = -1.0
    return machine.tick(0.0)


def _stale(letter: Letter, life: Life) -> bool:
    if letter.worker != life.worker:
        return False
    now = (life.incarnation, life.number)
    return (letter.incarnation, letter.number) != now or letter.server in life.got


def _with_host(state: State, server: int, host: Host) -> State:
    hosts = tuple(host if k == server else x for k, x in enumerate(state.hosts))
    return replace(state, hosts=hosts)


def _nowhere(record: Record) -> None:
    raise AssertionError("a machine decides something while nobody asks it")


def _told(letter: Letter) -> str:
    kind = type(letter.content).__name__.lower()
    life = f"worker {letter.worker}.{letter.incarnation}"
    server = f"server {letter.server}"
    ends = f"{server} -> {life}" if letter.is_reply else f"{life} -> {server}"
    return f"{kind} {letter.number} {ends}"


def forked(machine: Machine) -> Machine:
    """A machine that goes on by itself; what never changes is shared."""
    found = object.__new__(Machine)
    found.__dict__.update({n: _fork(x) for n, x in machine.__dict__.items()})
    return found


def _fork(x: Any) -> Any:
    if isinstance(x, Counter):
        return Counter(x)
    if isinstance(x, dict):
        return {k: _fork(v) for k, v in x.items()}
    if isinstance(x, list):
        return list(x)
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, Ledger):
        found = object.__new__(Ledger)
        found.__dict__.update({n: _fork(v) for n, v in x.__dict__.items()})
        return found
    return x


_PLAIN = frozenset((int, float, str, bool, bytes, type(None)))
_SKIPPED = ("updater", "blocks", "consistency", "borrowed", "journal", "fingerprint", "self")


def canonical(x: Any) -> Any:
    """A value as nested tuples: equal for what is alike."""
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind in (tuple, list):
        return tuple([canonical(v) for v in x])
    if isinstance(x, Tensor):
        return ("tensor", *x.shape, *x.flatten().tolist())
    if isinstance(x, (set, frozenset)):
        return ("set", *_in_order([canonical(v) for v in x]))
    if is_dataclass(x):
        return (kind.__name__, *[canonical(getattr(x, n)) for n in _own_fields(kind)])
    if isinstance(x, Mapping):
        return ("map", *_in_order([(canonical(k), canonical(v)) for k, v in x.items()]))
    if isinstance(x, GeneratorType):
        return _frames(x)
    if isinstance(x, FunctionType):
        cells = [c.cell_contents for c in x.__closure__ or ()]
        return (x.__qualname__, *(canonical(c) for c in cells if not isinstance(c, Session)))
    if isinstance(x, BaseException):
        return (type(x).__name__, *(canonical(v) for v in x.__dict__.values()))
    if isinstance(x, Worlds):
        return "worlds"
    raise TypeError(f"{type(x).__name__} has no canonical form")


@cache
def _own_fields(kind: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.name not in _SKIPPED)


def _in_order(found: list[Any]) -> list[Any]:
    return sorted(found, key=repr) if len(found) > 1 else found


def _frames(script: Any) -> Any:
    """Where a generator is, and those that it waits for: the instruction and the local values of each."""
    found = []
    while isinstance(script, GeneratorType):
        frame = script.gi_frame
        if frame is None:
            break
        local = {n: canonical(x) for n, x in frame.f_locals.items() if n not in _SKIPPED}
        local.pop("session", None)
        found.append((script.__qualname__, frame.f_lasti, tuple(sorted(local.items()))))
        script = script.gi_yieldfrom
    return tuple(found)


def _short(x: Any) -> bytes:
    return blake2b(repr(x).encode(), digest_size=16).digest()


def main() -> None:
    """The command."""
    options = vars(parser(__doc__, **asdict(Bounds()), count=None, minutes=None).parse_args())
    most, minutes = options.pop("count"), options.pop("minutes")
    torch.set_num_threads(1)
    bounds, begin = Bounds(**options), time.monotonic()
    try:
        found = search(bounds, most=most, seconds=minutes and 60 * minutes)
    except Violation as error:
        print(f"{bounds}\n{error}")
        sys.exit(1)
    print(
        f"{bounds}\n{found.states:,} states, {found.steps:,} steps, {found.finals:,} ends, "
        f"depth {found.depth}, {'all' if found.complete else 'NOT all'} of them, "
        f"{time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
