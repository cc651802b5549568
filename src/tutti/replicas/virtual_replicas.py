"""All replicas of one rank's weights in one process: the oracle of tests and of `verify`.

Asynchronous calls get their answers here in the order of replicas, and land at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tutti.replicas.member import ReplicaMember
from tutti.replicas.pieces import TensorPiece, cut, joined
from tutti.replicas.strategy import CALLS, CENTRE, MEAN, Round, Strategy, Weights
from tutti.replicas.traffic import Message


class Replicas:
    """The ranks with the same weights in each replica; they exchange directly.

    Args:
        strategy: their strategy.
        names: every weight that replicas exchange, in the model's order.
        weights: of each replica, by name; some of `names`.

    `trained` are the weights that the steps train: all that have joined, unless it is set to others.
    """

    def __init__(
        self, strategy: Strategy, names: Sequence[str], weights: Sequence[Weights]
    ) -> None:
        self.strategy = strategy
        self.members = [ReplicaMember(strategy, len(weights)) for _ in weights]
        self.underway: dict[Round, list[Message]] = {}
        self.trained: list[str] = []
        self.join(names, weights, 1)

    def join(self, names: Sequence[str], weights: Sequence[Weights], step: int) -> None:
        """Exchange more weights from `step` on, with their values before it."""
        self.trained += names
        for member, own in zip(self.members, weights, strict=True):
            member.join(dict.fromkeys(names, ()), own, step)

    def after(
        self, step: int, weights: Sequence[Weights], buffers: Sequence[Weights] = ()
    ) -> list[Weights]:
        """The changes of each replica's weights and buffers after `step`, which has trained `trained`."""
        for member in self.members:
            member.roster.train(self.trained, step)
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
            self.underway[due] = self.exchange(due, [message for _, message in begun])
            if due.lands == step:
                note(self._land(due, now))
        return changed

    def _land(self, due: Round, now: list[Weights]) -> list[Weights]:
        received = self.underway.pop(due)
        return [
            m.land(due, own, dict(message))
            for m, own, message in zip(self.members, now, received, strict=True)
        ]

    def exchange(self, due: Round, sent: list[Message]) -> list[Message]:
        """The result of each replica's message."""
        if due.kind in CALLS:
            return [self._called(due, i, message) for i, message in enumerate(sent)]
        if due.kind != MEAN:
            return [{n: x.clone() for n, x in sent[i - due.hop].items()} for i in range(len(sent))]
        size = due.group or len(sent)
        found: list[Message] = []
        for begin in range(0, len(sent), size):
            members = self.members[begin : begin + size]
            sides = [
                m.mean(message, i, size)
                for i, (m, message) in enumerate(zip(members, sent[begin:], strict=False))
            ]
            parts = [side.combine(j, [s.parts[j] for s in sides]) for j, side in enumerate(sides)]
            for member, side in zip(members, sides, strict=True):
                member.settle(side)
                found.append(side.assemble(parts))
        return found

    def _called(self, due: Round, replica: int, message: Message) -> Message:
        """The replies to one replica's calls, answered one after the other."""
        parts = cut(message, len(self.members))
        pieces = [p for part in parts for p in part]
        calls: list[tuple[int, list[TensorPiece]]] = list(enumerate(parts))
        if due.kind != CENTRE:
            partner = self.strategy.partner(due.begins, replica, range(len(self.members)))
            calls = [] if partner is None else [(partner, pieces)]
        replies: Message = {}
        for holder, asked in calls:
            replies |= self.members[holder].answer(asked, {p.key: p.of(message) for p in asked})
        return joined(pieces, replies, message) if replies else {}
