"""Each replica sends half of its sums to one other: stochastic gradient push.

    x_i <- x_i / 2 + x_j / 2        w_i <- w_i / 2 + w_j / 2        weights z_i = x_i / w_i

Assran et al., 1811.10792. At round k replica i sends to replica i + 2^(k mod log2 R): if R is a power of two,
all weights have reached all replicas after log2 R rounds. The sum of x and the sum of w, with messages in
flight, are constant; so the z_i approach the mean even if messages land late (`delay`), when the w_i differ.
Each weight has a w of its own, as it may join while messages are in flight.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from tutti.replicas.strategy import PUSH, Round, State, Strategy, Weights, at_least, of_kind

# With this before its name, a weight's mass w in messages.
MASS = "mass of "


@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy):
    """No replica waits for all: it receives from one other per round.

    Args:
        every: steps between two rounds.
        delay: steps until a message is used; a sender may be that many steps late before its receiver
            waits.
    """

    every: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        at_least(self, "every", 1)
        at_least(self, "delay", 0)

    @property
    def longest_delay(self) -> int:
        """The most steps between the begin of a round and its result."""
        return self.delay

    def rounds(self, step: int, num_replicas: int) -> list[Round]:
        """A push with a hop that doubles from round to round."""
        if step % self.every:
            return []
        num_hops = max(1, (num_replicas - 1).bit_length())
        hop = 2 ** ((step // self.every - 1) % num_hops)
        return [Round(step, step + self.delay, PUSH, hop=hop % num_replicas)]

    def init(self, weights: Weights) -> State:
        """x = z and w = 1."""
        whole = {f"mass.{n}": x.new_ones(()) for n, x in weights.items()}
        return of_kind("biased", weights) | whole

    def offer(
        self, state: State, weights: Weights, due: Round
    ) -> tuple[State, Weights, dict[str, Tensor]]:
        """Send half of x and w, keep half."""
        half = {n: x / 2 for n, x in self._biased(state, weights).items()}
        mass = {n: state[f"mass.{n}"] / 2 for n in half}
        sent = {n: x.clone() for n, x in half.items()} | {MASS + n: w for n, w in mass.items()}
        return _state(half, mass), _unbiased(half, mass), sent

    def take(
        self,
        state: State,
        weights: Weights,
        received: dict[str, Tensor],
        due: Round,
        still: Collection[str] = (),
    ) -> tuple[State, Weights]:
        """Add the received x and w."""
        biased = {n: x + received[n] for n, x in self._biased(state, weights).items()}
        mass = {n: state[f"mass.{n}"] + received[MASS + n] for n in biased}
        return _state(biased, mass), _unbiased(biased, mass)

    def _biased(self, state: State, weights: Weights) -> Weights:
        """x, with the local steps of z since the last round."""
        found = {}
        for n, z in weights.items():
            x = state[f"biased.{n}"]
            found[n] = x + (z - x / state[f"mass.{n}"])
        return found


def _state(biased: Weights, mass: Weights) -> State:
    return {f"biased.{n}": x for n, x in biased.items()} | {f"mass.{n}": w for n, w in mass.items()}


def _unbiased(biased: Weights, mass: Weights) -> Weights:
    return {n: x / mass[n] for n, x in biased.items()}
