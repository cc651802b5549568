"""A server's decisions, without sockets, files or a clock: `handle(source, request, now) -> answers`.

It checks each request against the ledger, writes its decision to the journal *before* it answers, and holds
requests that must wait (a pull without its permit) until they can proceed. It answers a repeated request
again, but acts once:

    push of sequence k      last was k - 1: taken        k or less: answered again, from the ledger
    another incarnation     older: fenced                newer: its Join fences the older one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tutti.server.protocol import messages as m
from tutti.server.protocol.check import (
    check_add,
    check_join,
    check_load,
    check_push,
    check_rows,
    check_settle,
    wrong,
)
from tutti.server.protocol.keys import named
from tutti.server.protocol.ledger import (
    Applied,
    Closed,
    Departed,
    Entered,
    JoiningEnded,
    KnownWorker,
    Ledger,
    Record,
)
from tutti.server.protocol.messages import FENCED, Refused, Reply, Request, TensorPart
from tutti.server.protocol.predict import predicted
from tutti.server.protocol.update import WEIGHT, add_up

LEASE_SECONDS = 5.0
BEAT_SECONDS = 1.0
GATHER_SECONDS = 60.0
OBSERVER = -1
_MOST_NAMES = 1024  # small sums of one clock

# The source of a request, and the answer.
Answers = list[tuple[Any, Reply]]


@dataclass(eq=False)
class Machine:
    """One server.

    Args:
        ledger: its state.
        journal: makes a record durable beyond this process; called before the ledger takes the record.
        num_servers: with several, the workers bring the sums of a coupled update (`Settle`).
        lease_seconds: a worker that is silent for so long has left; under `step`, whose updates need the rows
            of every worker, it is waited for.
        gather_seconds: how long to wait for all other workers after the first; under `step` without limit.

    `lapsed` has the workers whose lease has ended, with the seconds of their silence up to then.
    """

    ledger: Ledger
    journal: Callable[[Record], None]
    num_servers: int = 1
    lease_seconds: float = LEASE_SECONDS
    gather_seconds: float = GATHER_SECONDS
    lapsed: dict[int, float] = field(default_factory=dict)
    _begun_at: float | None = None
    _leases: dict[int, float] = field(default_factory=dict)
    _heard: Counter[int] = field(default_factory=Counter)
    _waiting: list[tuple[Any, Request]] = field(default_factory=list)

    def handle(self, source: Any, request: Request, now: float) -> Answers:
        """The answers that `request` makes possible: to it, and to waiting ones.

        Args:
            source: the receiver of its answer; any comparable value.
            now: seconds of any monotonic clock.
        """
        refused = self._refuse_stranger(request)
        if refused:
            return [(source, refused)]
        if request.worker in self.ledger.members:
            self._leases[request.worker] = now + self.lease_seconds
            self._heard[request.worker] += 1
        reply = _HANDLE[type(request)](self, request)
        if isinstance(request, m.Join) and isinstance(reply, m.JoinReply):
            self._leases[request.worker] = now + self.lease_seconds
        answers: Answers = [] if reply is None else [(source, reply)]
        if reply is None:
            self._wait(source, request)
        return answers + (self._go_on() if isinstance(request, _MOVES) else [])

    def tick(self, now: float) -> Answers:
        """The answers that the passing of time makes possible: leases end, but not under `step`."""
        active, ended = self.ledger.active(), self.silent(now)
        ended = ended if self.ledger.consistency.apart else {}
        for worker, seconds in ended.items():
            self.lapsed.setdefault(worker, seconds)
            self._decide(Departed(worker, active[worker].incarnation))
        if self._gathered(now):
            self._decide(JoiningEnded())
        elif not ended:
            return []
        return self._go_on()

    def silent(self, now: float) -> dict[int, float]:
        """The present workers whose lease is over, and the seconds since their last request, most first."""
        ends = {
            w: self._leases.setdefault(w, now + self.lease_seconds) for w in self.ledger.active()
        }
        over = sorted((end, worker) for worker, end in ends.items() if end <= now)
        return {worker: now - end + self.lease_seconds for end, worker in over}

    def _gathered(self, now: float) -> bool:
        """Whether the wait for workers that never joined is over; under `step` present workers need them."""
        if self.ledger.started or not self.ledger.members:
            return False
        if not self.ledger.consistency.apart and self.ledger.active():
            return False
        self._begun_at = now if self._begun_at is None else self._begun_at
        return now - self._begun_at > self.gather_seconds

    def forget(self, gone: Callable[[Any], bool]) -> None:
        """Drop the waiting requests of sources that have `gone`."""
        self._waiting = [(s, r) for s, r in self._waiting if not gone(s)]

    def dismiss(self) -> list[tuple[Any, Request]]:
        """Remove and return the waiting requests, with their sources."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def returned(self, reply: Reply) -> None:
        """Give back the tensors lent to a reply that has left, or never will."""
        if isinstance(reply, m.Weights):
            for key, part in reply.parts.items():
                self.ledger.give_back(key, part.values)

    def recover(self) -> None:
        """Continue after the ledger's records; leases begin anew with the first tick."""
        self._go_on()

    def _wait(self, source: Any, request: Request) -> None:
        """Hold a request; a repeated one waits once."""
        kept = [(s, r) for s, r in self._waiting if s != source or type(r) is not type(request)]
        self._waiting = [*kept, (source, request)]

    def _decide(self, record: Record) -> None:
        self.journal(record)
        self.ledger.take(record)

    def _refuse_stranger(self, request: Request) -> Refused | None:
        """Refuse all but the live incarnation of a worker, and observers."""
        if isinstance(request, m.Join):
            return None
        if request.worker == OBSERVER and isinstance(request, m.Pull | m.Status):
            return None
        member = self.ledger.members.get(request.worker)
        if member is None:
            return Refused(reason=FENCED, text=f"worker {request.worker} has not joined")
        if member.incarnation != request.incarnation or not member.active:
            ended = "has left, or was not heard of" if not member.active else "has been replaced"
            text = f"worker {request.worker} {ended}"
            return _refused(FENCED, text, member)
        return None

    def _go_on(self) -> Answers:
        """Close and apply every possible clock, then answer the waiting requests that can proceed."""
        while self._close() and self._settle_alone():
            pass
        waiting, self._waiting = self._waiting, []
        answers: Answers = []
        for source, request in waiting:
            reply = self._refuse_stranger(request) or _HANDLE[type(request)](self, request)
            if reply is None:
                self._waiting.append((source, request))
            else:
                answers.append((source, reply))
        return answers

    def _close(self) -> bool:
        """Close the clock that is due if every worker has pushed for it; whether it is closed.

        One of several servers may have lost contact with all workers for a clock: they begin anew after it,
        and this server closes it without a gradient.
        """
        ledger, clock = self.ledger, self.ledger.version
        if (clock, "") in ledger.closed:
            return True
        pushes, active = ledger.pending.get(clock, {}), ledger.active().values()
        if ledger.alone or not ledger.started or not (pushes or active):
            return False
        if any(member.clock <= clock for member in active):
            return False
        self._decide(Closed(clock, "", tuple(sorted(pushes))))
        return True

    def _settle_alone(self) -> bool:
        """Apply the closed clock if that needs no other server."""
        ledger = self.ledger
        if not ledger.updater.coupled:
            self._decide(Applied(ledger.version, {}))
            return True
        if self.num_servers > 1:
            return False
        self._decide(
            Applied(ledger.version, add_up(named(ledger.blocks, ledger.sums(ledger.version))))
        )
        return True

    def _join(self, join: m.Join) -> Reply:
        ledger, known = self.ledger, self.ledger.members.get(join.worker)
        if refused := check_join(ledger, join):
            return refused
        first = ledger.first_clock(join.worker)
        if join.clock > first and not ledger.consistency.apart:
            return wrong(
                f"worker {join.worker} would begin at step {join.clock}, and its rows of step {first} are "
                "missing here, though another server has them"
            )
        if known and join.incarnation < known.incarnation:
            return _refused(FENCED, f"worker {join.worker} has been replaced", known)
        if known and join.incarnation == known.incarnation:
            if not known.active:
                return _refused(FENCED, f"worker {join.worker} has left", known)
            if join.clock > known.clock and not known.sequence:
                self._decide(Entered(join.worker, join.incarnation, join.clock))
        else:
            self._decide(Entered(join.worker, join.incarnation, max(first, join.clock)))
        member = ledger.members[join.worker]
        return m.JoinReply(
            clock=member.clock,
            version=ledger.version,
            sequence=member.sequence,
            num_workers=len(ledger.active()),
        )

    def _pull(self, pull: m.Pull) -> Reply | None:
        ledger = self.ledger
        refused = check_rows(ledger, pull.slot, pull.keys, pull.rows)
        if refused:
            return refused
        if pull.worker != OBSERVER and not ledger.consistency.permits(pull.clock, ledger.floor):
            return None
        ahead = ledger.predicts and pull.slot == WEIGHT and pull.worker != OBSERVER
        part = self._predicted if ahead else self._lent
        parts = {key: part(key, pull.slot, pull.rows.get(key)) for key in pull.keys}
        return m.Weights(version=ledger.version, numbers=ledger.numbers, parts=parts)

    def _lent(self, key: int, slot: str, rows: Tensor | None) -> TensorPart:
        if rows is None:
            return TensorPart(self.ledger.lend(key, slot))
        return TensorPart(self.ledger.state[key][slot][rows], rows=rows)

    def _predicted(self, key: int, _: str, rows: Tensor | None) -> TensorPart:
        ledger = self.ledger
        return TensorPart(predicted(ledger.state[key], ledger.lag, rows), rows=rows)

    def _push(self, push: m.Push | m.Load) -> Reply:
        ledger, member = self.ledger, self.ledger.members[push.worker]
        if push.sequence == member.sequence and member.answer:
            return member.answer
        if push.sequence <= member.sequence:
            return m.Done(version=ledger.version, sequence=push.sequence)
        if isinstance(push, m.Push):
            refused = check_push(ledger, push, member)
        else:
            refused = check_load(ledger, push, member)
        if refused:
            return refused
        self._decide(push)
        answer = ledger.members[push.worker].answer
        assert answer is not None
        return answer

    def _sums(self, request: m.Sums) -> Reply | None:
        ledger = self.ledger
        if request.clock < ledger.version:  # another worker may have told only some servers
            return m.Partial(clock=request.clock, sums={}, settled=ledger.settled)
        if (request.clock, "") not in ledger.closed:
            return None
        return m.Partial(clock=request.clock, sums=ledger.sums(request.clock))

    def _settle(self, settle: m.Settle) -> Reply:
        ledger = self.ledger
        if settle.clock >= ledger.version:
            if refused := check_settle(ledger, settle):
                return refused
            self._decide(Applied(settle.clock, settle.sums))
        return m.Done(version=ledger.version)

    def _add(self, add: m.Add) -> Reply | None:
        ledger, sum_of = self.ledger, (add.clock, add.name)
        if sum_of not in ledger.closed:
            if refused := check_add(ledger, add, _MOST_NAMES):
                return refused
            if add.worker not in ledger.added.get(sum_of, ()):
                self._decide(add)
            there = ledger.added[sum_of]
            late = [
                w for w, x in ledger.active().items() if x.clock <= add.clock and w not in there
            ]
            if late or not ledger.started:
                return None
            self._decide(Closed(add.clock, add.name, tuple(sorted(there))))
        return m.Total(values=ledger.total(add.clock, add.name))

    def _beat(self, beat: m.Beat) -> Reply:
        return m.Done(version=self.ledger.version)

    def _leave(self, leave: m.Leave) -> Reply:
        self._decide(Departed(leave.worker, leave.incarnation))
        return m.Done(version=self.ledger.version)

    def _status(self, status: m.Status) -> Reply:
        ledger = self.ledger
        return m.Figures(
            version=ledger.version,
            staleness=dict(ledger.staleness),
            workers=tuple(sorted(ledger.active())),
            gone=tuple(ledger.gone()),
            heard=dict(self._heard),
            meetings=ledger.meetings,
        )


def _refused(reason: str, text: str, member: KnownWorker) -> Refused:
    return Refused(
        reason=reason, text=text, incarnation=member.incarnation, sequence=member.sequence
    )


# The requests that may let waiting ones proceed.
_MOVES = (m.Join, m.Push, m.Settle, m.Add, m.Leave)
_HANDLE: dict[type, Callable[[Machine, Any], Reply | None]] = {
    m.Join: Machine._join,
    m.Pull: Machine._pull,
    m.Push: Machine._push,
    m.Load: Machine._push,
    m.Sums: Machine._sums,
    m.Settle: Machine._settle,
    m.Add: Machine._add,
    m.Beat: Machine._beat,
    m.Leave: Machine._leave,
    m.Status: Machine._status,
}
