"""One rank's place among the replicas of a run: what happens there after each step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tutti.comm.agree import check_order
from tutti.comm.background import Background, Underway
from tutti.errors import CommError
from tutti.layout import Mesh
from tutti.replicas.between import Between
from tutti.replicas.member import Member
from tutti.replicas.strategy import Round, State, Strategy, Weights
from tutti.replicas.traffic import Message

# Results that have come but not landed, in a checkpoint: "arrived 96 2.weight".
_ARRIVED = "arrived"


class Team:
    """Plays a strategy on this rank; all ranks of the run make theirs together.

    Between rounds no rank waits for another replica. An exchange whose result lands later runs beside the
    computation.

    Args:
        strategy: how replicas agree.
        mesh: of the run, with an axis `replica`.
        names: every weight that they agree on, in the model's order.
        device: where the weights lie.
    """

    def __init__(
        self, strategy: Strategy, mesh: Mesh, names: Sequence[str], device: torch.device
    ) -> None:
        self.strategy = strategy
        self.between = Between(strategy, mesh, device)
        self.member = Member(strategy, names)
        self._background = Background()
        self._underway: dict[Round, tuple[list[str], Underway]] = {}
        self._arrived: dict[Round, Message] = {}

    def start(self, weights: Weights, everything: Mapping[str, Tensor]) -> None:
        """Begin from `weights`, after all replicas have shown that they have the same state.

        Raises:
            CommError: on every rank, where replicas differ in `everything`, with the first such tensor.
        """
        self._check_same(everything)
        self.member.start(weights)

    def restart(self, weights: Weights) -> None:
        """Begin anew from `weights`, which are known to be the same for all replicas."""
        self._drop()
        self.member.start(weights)

    def is_due(self, step: int) -> bool:
        """Whether anything happens after `step`."""
        landing = any(due.lands == step for due in (*self._arrived, *self._underway))
        return landing or bool(self.strategy.rounds(step, self.between.num_replicas))

    def after(self, step: int, weights: Weights, buffers: Weights) -> Weights:
        """What changes after `step`, of this rank's weights and buffers by name.

        Raises:
            CommError: a replica that takes part in a round is gone, or does not come in time.
        """
        now, changed = dict(weights), dict[str, Tensor]()

        def note(new: Weights) -> None:
            changed.update(new)
            now.update(new)

        for due in [due for due in (*self._arrived, *self._underway) if due.lands == step]:
            note(self.member.land(due, now, self._result(due)))
        for due in self.strategy.rounds(step, self.between.num_replicas):
            own, sent = self.member.begin(due, now, buffers)
            note(own)
            if due.lands == step:
                received = self.between.exchange(due, sent, lambda m, d=due: self.member.read(d, m))
                note(self.member.land(due, now, received))
            else:
                self._start(due, sent)
        return changed

    def state(self) -> State:
        """All that a run must know to go on as it would have; waits for what is under way."""
        arrived = {due: self._result(due) for due in list(self._underway)}
        self._arrived |= arrived
        kept = {
            f"{_ARRIVED} {due.begins}.{name}": x
            for due, message in self._arrived.items()
            for name, x in message.items()
        }
        return self.member.state | kept

    def expected(self, weights: Weights, buffers: Weights, step: int) -> State:
        """What `state` holds after `step`: names, shapes and dtypes; the values mean nothing."""
        begin = self.strategy.init(weights)
        found = dict(begin)
        for k in range(max(1, step - self.strategy.longest_delay), step + 1):
            for due in self.strategy.rounds(k, self.between.num_replicas):
                if due.lands > step:
                    member = Member(self.strategy, self.member.names, dict(begin))
                    message = member.read(due, member.begin(due, weights, buffers)[1])
                    found |= {f"{_ARRIVED} {k}.{n}": x for n, x in message.items()}
        return found

    def load(self, state: State, step: int) -> None:
        """Go on from `state`, as it was after `step`."""
        self._drop()
        self.member.state = {n: x for n, x in state.items() if not n.startswith(_ARRIVED)}
        for begins in sorted({_begins(n) for n in state if n.startswith(_ARRIVED)}):
            (due,) = (
                r for r in self.strategy.rounds(begins, self.between.num_replicas) if r.lands > step
            )
            prefix = f"{_ARRIVED} {begins}."
            self._arrived[due] = {
                n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)
            }

    def _drop(self) -> None:
        """Forget what is under way, once it is there: the others have sent it."""
        for due in (*self._arrived, *self._underway):
            self._result(due)

    def _start(self, due: Round, sent: Message) -> None:
        if (
            not sent
        ):  # this rank holds nothing of the fragment, nor do those that it would exchange with
            self._arrived[due] = {}
            return
        names = list(self.member.read(due, sent))

        def move() -> list[Tensor]:
            received = self.between.exchange(due, sent, lambda m: self.member.read(due, m))
            return [received[n] for n in names]

        self._underway[due] = names, self._background.start(move, list(sent.values()))

    def _result(self, due: Round) -> Message:
        if due in self._arrived:
            return self._arrived.pop(due)
        names, underway = self._underway.pop(due)
        return dict(zip(names, self._background.finish(underway), strict=True))

    def _check_same(self, everything: Mapping[str, Tensor]) -> None:
        entries = [f"{n}: sha256 {_digest(x)}" for n, x in everything.items()]
        try:
            check_order(entries, group=self.between.group)
        except CommError as error:
            raise CommError(
                "replicas do not start from the same state",
                why=error.why,
                fix="one seed, or one checkpoint, for all ranks before the first step",
            ) from None


def _begins(name: str) -> int:
    return int(name.split(".")[0].split(" ")[1])


def _digest(x: Tensor) -> str:
    data = x.detach().cpu().contiguous().view(-1)
    raw = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return hashlib.sha256(raw).hexdigest()[:16]
