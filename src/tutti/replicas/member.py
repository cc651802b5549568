"""One replica's side of a strategy: its state and its messages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tutti.replicas.gossip import MASS
from tutti.replicas.mean import Mean
from tutti.replicas.pieces import TensorPiece
from tutti.replicas.roster import Roster, Shapes
from tutti.replicas.strategy import MEAN, Round, State, Strategy, Weights, check_dtypes
from tutti.replicas.traffic import Message


@dataclass
class ReplicaMember:
    """Plays a strategy for one rank of one replica.

    Args:
        strategy: the same for all replicas.
        num_replicas: of the run.
        state: the strategy's state, by `kind.name`.
        roster: every weight that replicas exchange; this rank may hold fewer.

    Another thread may call `answer`; `lock` makes each operation atomic.
    """

    strategy: Strategy
    num_replicas: int
    state: State = field(default_factory=dict)
    roster: Roster = field(default_factory=Roster)
    lock: Any = field(default_factory=threading.RLock)

    def start(self) -> None:
        """Begin anew, without weights."""
        with self.lock:
            self.state, self.roster = {}, Roster()

    def join(self, shapes: Shapes, weights: Weights, step: int) -> State:
        """Exchange more weights from `step` on, the first that trains them; their initial state.

        Args:
            shapes: of all of them.
            weights: those of this rank, equal on all replicas.

        Raises:
            LayoutError: replicas cannot average one of them.
        """
        check_dtypes(self.strategy, weights)
        with self.lock:
            self.roster.join(shapes, step)
            begun = self.strategy.init(weights)
            self.state |= begun
        return begun

    def part(self, due: Round) -> list[str]:
        """The names of the weights that take part in a round which begins now."""
        return self.roster.part(due, self.strategy)

    def begin(self, due: Round, weights: Weights, buffers: Weights) -> tuple[Weights, Message]:
        """The changed weights of a round, and this rank's message.

        `buffers` (running statistics) go with the first fragment of a mean, unchanged. The message of a round
        that lands later has copies of them: the next step changes buffers in place.
        """
        part, own, message = self.part(due), Weights(), Message()
        with self.lock:
            for n in [n for n in part if n in weights]:  # one by one: the old state makes room
                changed, new, offered = self.strategy.offer(self.state, {n: weights[n]}, due)
                self.state |= changed
                own |= new
                message |= offered
            self.roster.meet(due, part)
        if due.kind == MEAN and due.fragment == 0:
            at_once = due.lands == due.begins
            message = message | {n: x if at_once else x.clone() for n, x in buffers.items()}
        return own, message

    def mean(self, message: Message, index: int, count: int) -> Mean:
        """This rank's side of a mean over `count` replicas; call `settle` after it."""
        return Mean(self.strategy.compression, message, self.state, index, count)

    def settle(self, mean: Mean) -> None:
        """Keep the errors of compression."""
        with self.lock:
            self.state |= mean.errors

    def answer(self, pieces: Sequence[TensorPiece], call: Message) -> Message:
        """The reply to another replica's call about these pieces of the weights."""
        with self.lock:
            kind = self.strategy.answers_from
            held = {
                n.partition(".")[2]: x for n, x in self.state.items() if n.startswith(f"{kind}.")
            }
            asked = {p.key: p for p in pieces if p.key in call and p.name in held}
            theirs = {key: call[key].to(held[p.name].device) for key, p in asked.items()}
            mine = {key: p.of(held) for key, p in asked.items()}
            new, reply = self.strategy.answer(mine, theirs, self.num_replicas)
            for key, value in new.items():
                mine[key].copy_(value)
            return reply

    def copy(self) -> State:
        """The state, with copies of what other replicas' calls change."""
        kind = self.strategy.answers_from
        with self.lock:
            return {
                n: x.clone() if kind and n.startswith(f"{kind}.") else x
                for n, x in self.state.items()
            }

    def replace(self, pieces: Sequence[TensorPiece], call: Message) -> None:
        """Set these pieces of the state that calls concern to those of `call`: their holder is lost."""
        with self.lock:
            for p in pieces:
                held = self.state.get(f"{self.strategy.answers_from}.{p.name}")
                if held is not None and p.key in call:
                    p.of({p.name: held}).copy_(call[p.key])

    def land(self, due: Round, weights: Weights, received: Message) -> Weights:
        """The changed weights and buffers after the result of a round, for the weights that began it.

        A weight that has gone since, or has another shape, stays as it is. It uses `received` up.
        """
        exchanged = [n for n in received if n in self.roster]
        own = {
            n: weights[n]
            for n in exchanged
            if n in weights and weights[n].shape == received[n].shape
        }
        buffers = {n: x for n, x in received.items() if n not in self.roster and due.kind == MEAN}
        still = self.roster.still(due, own)
        with self.lock:
            for n in list(own):  # one by one: the old state and the numbers received make room
                theirs = {k: received.pop(k) for k in (n, MASS + n) if k in received}
                changed, new = self.strategy.take(self.state, {n: own[n]}, theirs, due, still)
                self.state |= changed
                own |= new
        received.clear()
        return own | buffers
