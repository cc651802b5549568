"""Changing pairs of replicas average their weights without waiting: asynchronous gossip.

    y_i, y_j = (y_i + y_j) / 2 at once          x = y + the replica's change since its last exchange

AD-PSGD: Lian et al., 1710.06952. Replicas form two sides: those in the first, third, ... place call, the
others answer, so that no two wait for each other. A caller sends y_i to a random one of the other side; a
thread there sets y_j to the mean and answers (y_j - y_i) / 2, which the caller adds when it arrives. The sum
of all y is constant. An average may change a replica's weights during its step: its gradient is then stale,
as in the paper.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from tutti.graph.randomness import random
from tutti.replicas.strategy import PAIR, Round, State, Strategy, Weights, at_least, of_kind

_STREAM = 0x7061697273  # no random op of a program has this stream


@dataclass(frozen=True, kw_only=True)
class Pairs(Strategy):
    """Asynchronous: after every `every` of its steps a replica averages with a random one of the other side.

    Args:
        every: steps of a replica between two exchanges.
    """

    every: int = 1

    def __post_init__(self) -> None:
        at_least(self, "every", 1)

    def rounds(self, step: int, num_replicas: int) -> list[Round]:
        """A call to a partner by the callers; the others publish their weights."""
        return [] if step % self.every else [Round(step, step, PAIR)]

    def partner(self, step: int, replica: int, here: Sequence[int]) -> int | None:
        """The replica that a caller calls after `step`; None for an answering replica or a lone one."""
        position = sorted(here).index(replica)
        others = sorted(here)[1::2]
        if position % 2 or not others:
            return None
        return others[random.key(replica, _STREAM, step) % len(others)]

    def init(self, weights: Weights) -> State:
        """y, and the weights at the replica's last exchange."""
        return of_kind("shared", weights) | of_kind("base", weights)

    def offer(
        self, state: State, weights: Weights, due: Round
    ) -> tuple[State, Weights, dict[str, Tensor]]:
        """Add the replica's change since its last exchange to y, and set the weights to y."""
        now = {n: state[f"shared.{n}"] + (x - state[f"base.{n}"]) for n, x in weights.items()}
        return (
            of_kind("shared", now) | of_kind("base", now),
            now,
            {n: x.clone() for n, x in now.items()},
        )

    def answer(
        self, mine: dict[str, Tensor], theirs: dict[str, Tensor], num_replicas: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The mean, and its difference from the caller's weights."""
        reply = {n: (mine[n] - x) * 0.5 for n, x in theirs.items()}
        return {n: mine[n] - d for n, d in reply.items()}, reply

    @property
    def answers_from(self) -> str:
        """The part of the state that calls concern."""
        return "shared"

    def take(
        self,
        state: State,
        weights: Weights,
        received: dict[str, Tensor],
        due: Round,
        still: Collection[str] = (),
    ) -> tuple[State, Weights]:
        """Add the answer to the weights and y."""
        moved = {
            f"{kind}.{n}": state[f"{kind}.{n}"] + d
            for kind in ("shared", "base")
            for n, d in received.items()
        }
        return moved, {n: weights[n] + d for n, d in received.items()}
