"""All replicas of one rank's weights in one process: the oracle of tests and of `verify`."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.replicas import traffic
from tutti.replicas.member import Member
from tutti.replicas.strategy import MEAN, Round, Strategy, Weights
from tutti.replicas.traffic import Message


class Replicas:
    """The ranks that hold the same weights in each replica; they exchange directly.

    Args:
        strategy: how they agree.
        names: every weight that replicas agree on, in the model's order.
        weights: of each replica, by name; some of `names`.
    """

    def __init__(
        self, strategy: Strategy, names: Sequence[str], weights: Sequence[Weights]
    ) -> None:
        self.strategy = strategy
        self.members = [Member(strategy, names) for _ in weights]
        for member, own in zip(self.members, weights, strict=True):
            member.start(own)
        self.underway: dict[Round, list[Message]] = {}

    def after(
        self, step: int, weights: Sequence[Weights], buffers: Sequence[Weights] = ()
    ) -> list[Weights]:
        """What changes for each replica after `step`, weights and buffers by name."""
        now = [dict(own) for own in weights]
        changed: list[Weights] = [{} for _ in weights]
        whole = list(buffers) or [{} for _ in weights]

        def note(new: list[Weights]) -> None:
            for mine, own, part in zip(changed, now, new, strict=True):
                mine |= part
                own |= part

        for due in [due for due in self.underway if due.lands == step]:
            note(self._land(due, now))
        for due in self.strategy.rounds(step, len(now)):
            begun = [
                m.begin(due, own, mine)
                for m, own, mine in zip(self.members, now, whole, strict=True)
            ]
            note([own for own, _ in begun])
            self.underway[due] = self._exchange(due, [message for _, message in begun])
            if due.lands == step:
                note(self._land(due, now))
        return changed

    def _land(self, due: Round, now: list[Weights]) -> list[Weights]:
        received = self.underway.pop(due)
        return [
            m.land(due, own, message)
            for m, own, message in zip(self.members, now, received, strict=True)
        ]

    def _exchange(self, due: Round, sent: list[Message]) -> list[Message]:
        read = [m.read(due, message) for m, message in zip(self.members, sent, strict=True)]
        if due.kind != MEAN:
            return [read[i - due.hop] for i in range(len(read))]
        size = due.group or len(read)
        groups = [read[i : i + size] for i in range(0, len(read), size)]
        means = [traffic.mean(group) for group in groups for _ in group]
        return [{n: x.clone() for n, x in one.items()} for one in means]
