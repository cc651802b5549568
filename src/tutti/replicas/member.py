"""One replica's side of a strategy: its state, and what it sends and takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutti.replicas import traffic
from tutti.replicas.strategy import MEAN, Round, State, Strategy, Weights, check_dtypes
from tutti.replicas.traffic import Message


@dataclass
class Member:
    """What one rank of one replica does for a strategy.

    Args:
        strategy: the same for all replicas.
        names: every weight that replicas agree on, in the model's order; this rank may hold fewer.
        state: what the strategy remembers, by `kind.name`.
        dtypes: of the tensors of each message under way, which coded ones do not tell.
    """

    strategy: Strategy
    names: Sequence[str]
    state: State = field(default_factory=dict)
    _dtypes: dict[Round, dict[str, torch.dtype]] = field(default_factory=dict)

    def start(self, weights: Weights) -> None:
        """Begin anew from `weights`; raises `LayoutError` where they cannot be averaged."""
        check_dtypes(self.strategy, weights)
        self.state = self.strategy.init(weights)
        self._dtypes.clear()

    def part(self, due: Round) -> Sequence[str]:
        """The names of a fragment: every n-th weight, so that each has some of every depth."""
        return self.names[due.fragment :: self.strategy.num_fragments]

    def begin(self, due: Round, weights: Weights, buffers: Weights) -> tuple[Weights, Message]:
        """The weights of a round as they are from now on, and this rank's message.

        `buffers` (running statistics) go with the first fragment of a mean, as they are.
        """
        own = self._own(due, weights)
        changed, own, message = self.strategy.offer(self.state, own, due)
        if due.kind == MEAN and due.fragment == 0:
            message = message | buffers
        self._dtypes[due] = {n: x.dtype for n, x in message.items()}
        errors, sent = traffic.encoded(self.strategy.coding, message, self.state)
        self.state |= changed | errors
        return own, sent

    def read(self, due: Round, sent: Message) -> Message:
        """The message of any replica in a round that this one has begun."""
        return traffic.decoded(self.strategy.coding, sent, self._dtypes[due])

    def land(self, due: Round, weights: Weights, received: Message) -> Weights:
        """What changes, weights and buffers, now that the result of a round is there."""
        own = self._own(due, weights)
        buffers: dict[str, Tensor] = {
            n: x for n, x in received.items() if n not in own and due.kind == MEAN
        }
        theirs = {n: x for n, x in received.items() if n not in buffers}
        changed, own = self.strategy.take(self.state, own, theirs, due)
        self.state |= changed
        self._dtypes.pop(due, None)
        return own | buffers

    def _own(self, due: Round, weights: Weights) -> Weights:
        return {n: weights[n] for n in self.part(due) if n in weights}
