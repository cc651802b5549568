"""Two replicas average their weights, now one pair, now another, and nobody waits: asynchronous gossip.

    y_i, y_j = (y_i + y_j) / 2 at once          x = y + what the replica has changed since it last looked

AD-PSGD: Lian et al., 1710.06952. Replicas stand on two sides: those in the first, third, ... place ask, the
others answer, so that no two wait for each other. Who asks sends y_i to a random one of the other side; a
thread there makes y_j the mean and answers (y_j - y_i) / 2, which the asker adds when it comes. The sum of
all y stays as it is. A replica's steps are taken from weights that may be averaged meanwhile: its gradient
is stale, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tutti.graph.randomness import random
from tutti.replicas.strategy import PAIR, Round, State, Strategy, Weights, at_least, of_kind

_STREAM = 0x7061697273  # of no random op of a program


@dataclass(frozen=True, kw_only=True)
class Pairs(Strategy):
    """Asynchronous: every so many of its own steps a replica averages with a random one of the other side.

    Args:
        every: steps of a replica between two exchanges.
    """

    every: int = 1

    def __post_init__(self) -> None:
        at_least(self, "every", 1)

    def rounds(self, step: int, num_replicas: int) -> list[Round]:
        """A call to a partner, for those who ask; the others show what they have."""
        return [] if step % self.every else [Round(step, step, PAIR)]

    def partner(self, step: int, replica: int, here: Sequence[int]) -> int | None:
        """Whom a replica asks after `step`, of those that are here; None for who answers or is alone."""
        place = sorted(here).index(replica)
        others = sorted(here)[1::2]
        if place % 2 or not others:
            return None
        return others[random.key(replica, _STREAM, step) % len(others)]

    def init(self, weights: Weights) -> State:
        """y, and what the weights were when the replica last looked."""
        return of_kind("shared", weights) | of_kind("base", weights)

    def offer(
        self, state: State, weights: Weights, due: Round
    ) -> tuple[State, Weights, dict[str, Tensor]]:
        """y takes over what the replica has changed since it last looked, and the weights take over y."""
        now = {n: state[f"shared.{n}"] + (x - state[f"base.{n}"]) for n, x in weights.items()}
        return (
            of_kind("shared", now) | of_kind("base", now),
            now,
            {n: x.clone() for n, x in now.items()},
        )

    def answer(
        self, mine: dict[str, Tensor], theirs: dict[str, Tensor], num_replicas: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The mean, and how far the other is from it."""
        reply = {n: (mine[n] - x) * 0.5 for n, x in theirs.items()}
        return {n: mine[n] - d for n, d in reply.items()}, reply

    @property
    def answers_from(self) -> str:
        """Which part of the state is asked for."""
        return "shared"

    def take(
        self, state: State, weights: Weights, received: dict[str, Tensor], due: Round
    ) -> tuple[State, Weights]:
        """Weights and y move by what has been answered."""
        moved = {
            f"{kind}.{n}": state[f"{kind}.{n}"] + d
            for kind in ("shared", "base")
            for n, d in received.items()
        }
        return moved, {n: weights[n] + d for n, d in received.items()}
