"""Averages weights after several local steps: local SGD.

    x_i <- mean of x_j over the replicas j

Stich, 1805.09767; Lin et al., 1808.07217, for a warm-up with an average after every step (post-local SGD)
and two levels of periods (hierarchical local SGD).

    average(every=2, then=4, group=2)          step  1    2    3    4
    four replicas, neighbors in groups of 2          .  01|23  .   0123
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tutti.replicas import traffic
from tutti.replicas.strategy import Round, State, Strategy, Weights, at_least, of_kind, refuse


@dataclass(frozen=True, kw_only=True)
class Average(Strategy):
    """After every `every` steps each weight becomes its mean over the replicas.

    Args:
        every: steps between two averages.
        then: if given, only groups of neighbors average after `every` steps, and all replicas after
            `then`, a multiple of `every`.
        group: number of neighboring replicas in a group; used with `then`.
        after: length of a warm-up in steps: all replicas average after each; periods count from its end.
        traffic: fp32, bf16 or int8: the format of messages; the compressed ones send the change since the
            last average, with error feedback.

    With every=1, an optimizer whose update is linear in the gradient (SGD, also with momentum and
    weight decay), a loss that is a mean over samples, and no clipping, this is data parallelism.
    """

    every: int = 16
    then: int = 0
    group: int = 2
    after: int = 0
    traffic: str = "fp32"
    needs: ClassVar = {"group": "then"}

    def __post_init__(self) -> None:
        at_least(self, "every", 1)
        at_least(self, "after", 0)
        at_least(self, "group", 2)
        if self.then and (self.then <= self.every or self.then % self.every):
            raise refuse(
                self,
                f"then={self.then} is no multiple of every={self.every}",
                f"then={self.every * 4}",
                "every round of all replicas takes the place of one within the groups",
            )
        if self.then and self.compression != "fp32":
            raise refuse(
                self,
                f"traffic={self.traffic} cannot go with then={self.then}",
                "leave one of them out",
                "a compressed message is the change since all replicas last agreed, which groups do not",
            )

    @property
    def period(self) -> int:
        """The length in steps after which the schedule repeats."""
        return self.then or self.every

    @property
    def warm_up(self) -> int:
        """The step after which periods count."""
        return self.after

    @property
    def settles(self) -> bool:
        """A mean of all replicas is the same on each."""
        return True

    @property
    def keeps_state(self) -> bool:
        """If messages are changes, the weights of the last average."""
        return self.compression != "fp32"

    @property
    def shares(self) -> bool:
        """A mean is one whatever has moved the weights since the last."""
        return True

    @property
    def compression(self) -> str:
        """The format of messages."""
        return self.traffic

    def check(self, num_replicas: int) -> None:
        """With `then`, the replicas must divide into several groups of equal size."""
        if self.then and (num_replicas <= self.group or num_replicas % self.group):
            raise refuse(
                self,
                f"group={self.group} does not split replica={num_replicas} in several equal groups",
                f"replica={2 * self.group}, or leave then out",
            )

    def rounds(self, step: int, num_replicas: int) -> list[Round]:
        """One round at most."""
        since = step - self.after
        if since > 0 and since % self.every:
            return []
        near = self.then and since > 0 and since % self.then
        return [Round(step, step, group=self.group if near else 0)]

    def init(self, weights: Weights) -> State:
        """If messages are changes, the weights of the last average."""
        if not self.keeps_state:
            return {}
        return of_kind("anchor", weights) | traffic.no_error(self.compression, weights)

    def offer(
        self, state: State, weights: Weights, due: Round
    ) -> tuple[State, Weights, dict[str, Tensor]]:
        """The weights, or their change since the last average."""
        if self.compression == "fp32":
            return {}, weights, weights
        return {}, weights, {n: x - state[f"anchor.{n}"] for n, x in weights.items()}

    def take(
        self,
        state: State,
        weights: Weights,
        received: dict[str, Tensor],
        due: Round,
        still: Collection[str] = (),
    ) -> tuple[State, Weights]:
        """The mean."""
        if self.compression == "fp32":
            return {}, received
        new = {n: state[f"anchor.{n}"] + x for n, x in received.items()}
        return of_kind("anchor", new), new
