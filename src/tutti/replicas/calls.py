"""Asynchronous exchanges: a replica calls, a thread of another answers, the reply lands some steps later.

replica 0   steps . . o . . x . . . .        o  a call       x  its reply lands
replica 1   steps   . .|. . . . . .          |  a thread answers while the replica computes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tutti.errors import CommError
from tutti.replicas.between import Between
from tutti.replicas.member import ReplicaMember
from tutti.replicas.pieces import TensorPiece, cut, joined, names_of
from tutti.replicas.strategy import CENTRE, Round, Weights
from tutti.replicas.traffic import Message

# Events on this rank, in order: ("round", 8), ("answer", caller, key), ("land", replica, key).
Event = tuple[str, int] | tuple[str, int, str]


@dataclass(frozen=True)
class _Call:
    due: Round
    replica: int
    pieces: Sequence[TensorPiece]


class Calls:
    """One rank's calls to other replicas, and its answers to theirs.

    A replica calls a part of the centre, or a partner, again only after its answer or its loss: rounds skip
    a slow one.

    Args:
        member: this rank's side of the strategy.

    It calls `note`, if given, with every event in the order of their effects.
    """

    def __init__(self, member: ReplicaMember) -> None:
        self.member = member
        self.note: Callable[[Event], object] = lambda event: None
        self._parts: list[list[TensorPiece]] = []
        self._out: dict[str, _Call] = {}
        self._own: set[int] = set()
        self._here: list[int] = []
        self._num_starts = (
            0  # in the keys of calls: a reply from before the last start finds no call
        )
        self._unknown: dict[str, tuple[int, int]] = {}  # name -> (replica, its step)

    def start(self, between: Between) -> None:
        """Begin anew, without weights."""
        self._parts = [[] for _ in range(between.num_replicas)]
        self._own = {between.replica}
        self._num_starts += 1
        self._unknown.clear()
        self.drop()

    def join(self, weights: Weights) -> None:
        """Exchange more weights, those of this rank: each replica owns a part of them, too."""
        more = cut(weights, len(self._parts))
        with self.member.lock:
            self._parts = [
                [p for p in part if p.name not in weights] + new
                for part, new in zip(self._parts, more, strict=True)
            ]

    def check(self, step: int) -> None:
        """Raise `CommError` if another replica exchanges a weight that this one has not trained by then."""
        with self.member.lock:
            early = {n: at for n, at in self._unknown.items() if n not in self.member.roster}
            self._unknown = early
        for name, (replica, begins) in early.items():
            if begins <= step:
                raise CommError(
                    f'replica {replica} has exchanged "{name}" after step {begins}, and this one has not '
                    "trained it",
                    why="replicas exchange the same weights",
                    fix="freeze, unfreeze and add weights at the same steps on all replicas",
                )

    def drop(self) -> None:
        """Forget all open calls; their replies are dropped."""
        self._out.clear()

    def answer(self, replica: int, key: str, call: Message) -> Message:
        """The reply to another's call; threads of the post call this."""
        with self.member.lock:
            self._inherit(key, call)
            for name in {n.rpartition(":")[0] for n in call}:
                if name not in self.member.roster:
                    self._unknown[name] = replica, int(key.split(".")[0])
            reply = self.member.answer([p for part in self._parts for p in part], call)
            self.note(("answer", replica, key))
            return reply

    def begin(self, due: Round, weights: Weights, between: Between) -> Weights:
        """Begin a round after `receive`; the changed weights. Calls each replica without an open call."""
        with self.member.lock:
            own, message = self.member.begin(due, weights, {})
            self.note(("round", due.begins))
        changed = dict(own)
        self._out = {key: c for key, c in self._out.items() if c.replica in self._here}
        for key, replica, pieces in self._whom(due, between):
            call = {p.key: p.of(message) for p in pieces if p.name in message}
            if replica == between.replica:
                reply = self.answer(replica, key, call)
                changed |= self._land(_Call(due, replica, pieces), key, weights | changed, reply)
            elif not any(_part_of(k) == _part_of(key) for k in self._out):
                self._out[key] = _Call(due, replica, pieces)
                between.call(replica, key, call)
        return changed

    def receive(self, weights: Weights, between: Between) -> Iterator[Weights]:
        """The changes of each reply that has come; all ranks of the replica call this together.

        A replica of several ranks answers the others' calls here: their order must be the same on all ranks.
        """
        now, came = dict(weights), between.arrived()
        self._here = came.here
        for replica, key, call in came.calls:
            between.reply(replica, key, self.answer(replica, key, call))
        for replica, key, reply in came.replies:
            call = self._out.pop(key, None)
            if call is not None and call.replica == replica:
                new = self._land(call, key, now, reply)
                now |= new
                yield new

    def _whom(self, due: Round, between: Between) -> Iterator[tuple[str, int, list[TensorPiece]]]:
        here = self._here
        if due.kind == CENTRE:
            for j, pieces in enumerate(self._parts):
                holder = next(
                    i % between.num_replicas
                    for i in range(j, j + between.num_replicas)
                    if i % between.num_replicas in here
                )
                if pieces:
                    yield f"{due.begins}.{j}.{self._num_starts}", holder, pieces
            return
        partner = self.member.strategy.partner(due.begins, between.replica, here)
        if partner is not None:
            yield (
                f"{due.begins}..{self._num_starts}",
                partner,
                [p for part in self._parts for p in part],
            )

    def _inherit(self, key: str, call: Message) -> None:
        """Begin a lost replica's part of the centre from the caller's weights."""
        part = _part_of(key)
        if part and int(part) not in self._own:
            self._own.add(int(part))
            self.member.replace(self._parts[int(part)], call)

    def _land(self, call: _Call, key: str, weights: Weights, reply: Message) -> Weights:
        likes = {n: weights[n] for n in names_of(call.pieces) if n in weights}
        pieces = [p for p in call.pieces if p.name in likes]
        with self.member.lock:
            new = self.member.land(call.due, weights, joined(pieces, reply, likes))
            self.note(("land", call.replica, key))
            return new


def _part_of(key: str) -> str:
    """The part of the centre that a call is about, by its number; "" for all of the weights."""
    return key.split(".")[1]
