"""Replicas and a centre attract each other: elastic averaging.

    d = a (x_i - c)        x_i = x_i - d        c = c + d        a = beta / R

Zhang et al., 1412.6651, the asynchronous form. Each replica holds an equal part of the centre c: a thread
there answers callers, which send their weights of that part, one after the other. A caller continues
computing and subtracts d when the answer arrives. No replica waits for another.

When a replica is lost, the next one takes over its part of the centre, which restarts from the weights of the
first caller.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from tutti.replicas.strategy import (
    CENTRE,
    Round,
    State,
    Strategy,
    Weights,
    at_least,
    of_kind,
    refuse,
)


@dataclass(frozen=True, kw_only=True)
class Elastic(Strategy):
    """Asynchronous: after every `every` of its own steps a replica and a common centre attract each other.

    Args:
        every: steps of a replica between two exchanges with the centre.
        beta: the pull of all replicas together on the centre; a = beta / R for one of R.
    """

    every: int = 10
    beta: float = 0.9

    def __post_init__(self) -> None:
        at_least(self, "every", 1)
        if not 0 < self.beta <= 1:
            raise refuse(self, f"beta={self.beta} is not above 0 and up to 1", "beta=0.9")

    def rounds(self, step: int, num_replicas: int) -> list[Round]:
        """A call to the centre."""
        return [] if step % self.every else [Round(step, step, CENTRE)]

    def init(self, weights: Weights) -> State:
        """The centre begins with the replicas' weights."""
        return of_kind("centre", weights)

    def offer(
        self, state: State, weights: Weights, due: Round
    ) -> tuple[State, Weights, dict[str, Tensor]]:
        """The current weights."""
        return {}, weights, {n: x.clone() for n, x in weights.items()}

    def answer(
        self, mine: dict[str, Tensor], theirs: dict[str, Tensor], num_replicas: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The centre after one pull, and -d."""
        pull = self.beta / num_replicas
        reply = {n: (mine[n] - x) * pull for n, x in theirs.items()}
        return {n: mine[n] - d for n, d in reply.items()}, reply

    @property
    def answers_from(self) -> str:
        """The part of the state that calls concern."""
        return "centre"

    def take(
        self,
        state: State,
        weights: Weights,
        received: dict[str, Tensor],
        due: Round,
        still: Collection[str] = (),
    ) -> tuple[State, Weights]:
        """Add the centre's answer to the weights."""
        return {}, {n: weights[n] + d for n, d in received.items()}
