"""One replica's side of a strategy: its state and its messages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tutti.replicas.mean import Mean
from tutti.replicas.pieces import TensorPiece
from tutti.replicas.strategy import (
    CALLS,
    MEAN,
    Round,
    State,
    Strategy,
    Weights,
    check_dtypes,
)
from tutti.replicas.traffic import Message


@dataclass
class ReplicaMember:
    """Plays a strategy for one rank of one replica.

    Args:
        strategy: the same for all replicas.
        names: every weight that replicas exchange, in the model's order; this rank may hold fewer.
        num_replicas: of the run.
        state: the strategy's state, by `kind.name`.

    Another thread may call `answer`; `lock` makes each operation atomic.
    """

    strategy: Strategy
    names: Sequence[str]
    num_replicas: int
    state: State = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)

    def start(self, weights: Weights) -> None:
        """Begin anew from `weights`; raises `LayoutError` if replicas cannot average them."""
        check_dtypes(self.strategy, weights)
        with self.lock:
            self.state = self.strategy.init(weights)

    def part(self, due: Round) -> Sequence[str]:
        """The names of a fragment: every n-th weight, so that each fragment has weights of every depth."""
        return self.names[due.fragment :: self.strategy.num_fragments]

    def begin(self, due: Round, weights: Weights, buffers: Weights) -> tuple[Weights, Message]:
        """The changed weights of a round, and this rank's message.

        `buffers` (running statistics) go with the first fragment of a mean, unchanged. The message of a round
        that lands later has copies of them: the next step changes buffers in place.
        """
        with self.lock:
            changed, own, message = self.strategy.offer(self.state, self._own(due, weights), due)
            self.state |= changed
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

    def replace(self, pieces: Sequence[TensorPiece], call: Message) -> None:
        """Set these pieces of the state that calls concern to those of `call`: their holder is lost."""
        with self.lock:
            for p in pieces:
                held = {p.name: self.state[f"{self.strategy.answers_from}.{p.name}"]}
                p.of(held).copy_(call[p.key])

    def land(self, due: Round, weights: Weights, received: Message) -> Weights:
        """The changed weights and buffers after the result of a round."""
        own = self._own(due, weights)
        if due.kind in CALLS:  # the reply may be about a part
            own = {n: own[n] for n in received}
        buffers: dict[str, Tensor] = {
            n: x for n, x in received.items() if n not in own and due.kind == MEAN
        }
        theirs = {n: x for n, x in received.items() if n not in buffers}
        with self.lock:
            changed, own = self.strategy.take(self.state, own, theirs, due)
            self.state |= changed
        return own | buffers

    def _own(self, due: Round, weights: Weights) -> Weights:
        return {n: weights[n] for n in self.part(due) if n in weights}
