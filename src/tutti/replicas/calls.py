"""Exchanges without waiting: a replica calls, another's thread answers, the reply lands when it has come.

replica 0   steps . . o . . x . . . .        o  a call       x  its reply lands
replica 1   steps   . .|. . . . . .          |  answered by a thread, whatever the replica does
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tutti.replicas.between import Between
from tutti.replicas.member import ReplicaMember
from tutti.replicas.pieces import TensorPiece, cut, joined, names_of
from tutti.replicas.strategy import CENTRE, Round, Weights
from tutti.replicas.traffic import Message

# What happened on this rank, in order: ("round", 8), ("answer", caller, key), ("land", replica, key).
Event = tuple[str, int] | tuple[str, int, str]


@dataclass(frozen=True)
class _Call:
    due: Round
    replica: int
    pieces: Sequence[TensorPiece]


class Calls:
    """What one rank has asked others, and what it answers.

    A part of the centre, or a partner, is asked again once it has answered, or is lost: where it is slow,
    rounds pass without it.

    Args:
        member: this rank's side of the strategy.

    `note`, if given, is told of every event in the order in which they took effect.
    """

    def __init__(self, member: ReplicaMember) -> None:
        self.member = member
        self.note: Callable[[Event], object] = lambda event: None
        self._parts: list[list[TensorPiece]] = []
        self._out: dict[str, _Call] = {}
        self._own: set[int] = set()

    def start(self, weights: Weights, between: Between) -> None:
        """Begin anew."""
        self._parts = cut(weights, between.num_replicas)
        self._own = {between.replica}
        self.drop()

    def drop(self) -> None:
        """Forget what has been asked: replies that come yet are thrown away."""
        self._out.clear()

    def answer(self, replica: int, key: str, call: Message) -> Message:
        """The reply to another's call; threads of the post ask."""
        with self.member.lock:
            self._inherit(key, call)
            reply = self.member.answer([p for part in self._parts for p in part], call)
            self.note(("answer", replica, key))
            return reply

    def begin(self, due: Round, weights: Weights, between: Between) -> Weights:
        """A round: the weights from now on; asks whoever does not owe an answer."""
        with self.member.lock:
            own, message = self.member.begin(due, weights, {})
            self.note(("round", due.begins))
        changed = dict(own)
        self._out = {key: c for key, c in self._out.items() if c.replica in between.here()}
        for key, replica, pieces in self._whom(due, between):
            call = {p.key: p.of(message) for p in pieces}
            if replica == between.replica:
                reply = self.answer(replica, key, call)
                changed |= self._land(_Call(due, replica, pieces), key, weights | changed, reply)
            elif not any(c.pieces == pieces or due.kind != CENTRE for c in self._out.values()):
                self._out[key] = _Call(due, replica, pieces)
                between.call(replica, key, call)
        return changed

    def landed(self, weights: Weights, between: Between) -> Iterator[Weights]:
        """What each reply that has come changes."""
        now = dict(weights)
        for replica, key, reply in between.replies():
            call = self._out.pop(key, None)
            if call is not None and call.replica == replica:
                new = self._land(call, key, now, reply)
                now |= new
                yield new

    def _whom(self, due: Round, between: Between) -> Iterator[tuple[str, int, list[TensorPiece]]]:
        here = between.here()
        if due.kind == CENTRE:
            for j, pieces in enumerate(self._parts):
                holder = next(
                    i % between.num_replicas
                    for i in range(j, j + between.num_replicas)
                    if i % between.num_replicas in here
                )
                if pieces:
                    yield f"{due.begins}.{j}", holder, pieces
            return
        partner = self.member.strategy.partner(due.begins, between.replica, here)
        if partner is not None:
            yield f"{due.begins}.", partner, [p for part in self._parts for p in part]

    def _inherit(self, key: str, call: Message) -> None:
        """A part of the centre of a replica that is lost begins from the weights of who asks."""
        part = key.partition(".")[2]
        if part and int(part) not in self._own:
            self._own.add(int(part))
            self.member.replace(self._parts[int(part)], call)

    def _land(self, call: _Call, key: str, weights: Weights, reply: Message) -> Weights:
        likes = {n: weights[n] for n in names_of(call.pieces)}
        with self.member.lock:
            new = self.member.land(call.due, weights, joined(call.pieces, reply, likes))
            self.note(("land", call.replica, key))
            return new
