"""An outer optimizer with Nesterov momentum takes the mean change of the replicas as its gradient.

    D     = theta - mean of x_i                 the replicas' mean change in `every` steps
    m     = mu m + D
    theta = theta - eta (D + mu m)
    x_i   = theta

DiLoCo: Douillard et al., 2311.08105. Streaming DiLoCo (Douillard et al., 2501.18512) exchanges the weights
in fragments, each at its own steps. The result of an exchange may land some steps later, mixed into the
replica's current weights:

    x_i   = alpha x_i + (1 - alpha) theta

A weight that no step has trained meanwhile (the user has frozen it) becomes theta, the same on all replicas.

    diloco(every=8, fragments=4, delay=1)       step        2  3  4  5  6  7  8  9 10
                                                fragment 0                    o  x
                                                         1  o  x                    o
                                                         2        o  x
                                                         3              o  x
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.replicas import traffic
from tutti.replicas.strategy import Round, State, Strategy, Weights, at_least, of_kind, refuse


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Strategy):
    """Each replica trains with its own inner optimizer; an outer one updates the common weights theta.

    Args:
        every: steps between two exchanges of the same weight.
        lr, momentum: of the outer optimizer, eta and mu.
        fragments: number F of parts of the weights; part k goes k every / F steps later.
        delay: steps until a result lands; meanwhile the exchange overlaps the computation.
        alpha: the fraction of the replica's own weights that remains when a result lands late.
        after: length of a warm-up in steps: all replicas average after each, since papers begin from a
            pretrained model; the outer optimizer begins after it.
        traffic: fp32, bf16 or int8: the format of messages, with error feedback.

    lr=1 and momentum=0 is `average(every=...)`.
    """

    every: int = 50
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.5
    after: int = 0
    traffic: str = "fp32"

    def __post_init__(self) -> None:
        for option, least in (
            ("every", 1),
            ("lr", 0),
            ("momentum", 0),
            ("fragments", 1),
            ("delay", 0),
            ("after", 0),
        ):
            at_least(self, option, least)
        if self.momentum >= 1:
            raise refuse(
                self,
                f"momentum={self.momentum} is not below 1",
                "momentum=0.9",
                "the outer optimizer would forget no change, and go ever faster",
            )
        if self.fragments > self.every:
            raise refuse(
                self,
                f"fragments={self.fragments} is more than every={self.every}",
                f"fragments={self.every} or fewer",
                "each fragment has a step of its own",
            )
        if self.delay >= self.every:
            raise refuse(
                self,
                f"delay={self.delay} reaches the next exchange after every={self.every} steps",
                f"delay={self.every - 1} or less",
            )
        if not 0 <= self.alpha < 1:
            raise refuse(
                self, f"alpha={self.alpha} is not from 0 to 1", "alpha=0.5", "1 would never agree"
            )

    @property
    def num_fragments(self) -> int:
        """The number of parts of the weights."""
        return self.fragments

    @property
    def warm_up(self) -> int:
        """The step after which the outer optimizer begins."""
        return self.after

    @property
    def settles(self) -> bool:
        """Theta is the same on each."""
        return True

    @property
    def compression(self) -> str:
        """The format of messages."""
        return self.traffic

    @property
    def longest_delay(self) -> int:
        """The most steps between the begin of a round and its result."""
        return self.delay

    def rounds(self, step: int, num_replicas: int) -> list[Round]:
        """One round at most, as fragments have different steps; in the warm-up one round has all weights."""
        since = step - self.after
        if since <= 0:
            return [Round(step, step, fragment=k) for k in range(self.fragments)]
        return [
            Round(step, step + self.delay, fragment=k)
            for k in range(self.fragments)
            if (since - k * self.every // self.fragments) % self.every == 0
        ]

    def init(self, weights: Weights) -> State:
        """theta, and m = 0."""
        still = {f"momentum.{n}": torch.zeros_like(x) for n, x in weights.items()}
        return of_kind("anchor", weights) | still | traffic.no_error(self.compression, weights)

    def offer(
        self, state: State, weights: Weights, due: Round
    ) -> tuple[State, Weights, dict[str, Tensor]]:
        """This replica's part of D."""
        return {}, weights, {n: state[f"anchor.{n}"] - x for n, x in weights.items()}

    def take(
        self,
        state: State,
        weights: Weights,
        received: dict[str, Tensor],
        due: Round,
        still: Collection[str] = (),
    ) -> tuple[State, Weights]:
        """The outer step; in the warm-up the mean."""
        if due.begins <= self.after:
            means = {n: state[f"anchor.{n}"] - mean for n, mean in received.items()}
            return of_kind("anchor", means), means
        changed: State = {}
        new: Weights = {}
        for n, mean in received.items():
            m = self.momentum * state[f"momentum.{n}"] + mean
            anchor = state[f"anchor.{n}"] - self.lr * (mean + self.momentum * m)
            changed |= {f"momentum.{n}": m, f"anchor.{n}": anchor}
            alpha = self.alpha if self.delay and n not in still else 0.0
            new[n] = alpha * weights[n] + (1 - alpha) * anchor if alpha else anchor.clone()
        return changed, new
