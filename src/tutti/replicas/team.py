"""One rank's exchanges with the other replicas of a run, after each step."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tutti.comm.collectives.agree import check_order
from tutti.comm.collectives.payload import digest
from tutti.errors import CommError
from tutti.layout import Mesh
from tutti.replicas.between import Between
from tutti.replicas.calls import Calls
from tutti.replicas.mean import Mean
from tutti.replicas.member import ReplicaMember
from tutti.replicas.strategy import CALLS, MEAN, Round, State, Strategy, Weights
from tutti.replicas.traffic import Message

# Results received but not landed, in a checkpoint: "arrived 96 2.weight".
_ARRIVED = "arrived"


class Team:
    """Plays a strategy on this rank; all ranks of the run construct it together.

    Between rounds no rank waits for another replica. An exchange whose result lands later overlaps the
    computation. The strategy omits a lost replica from then on; the first remaining one prints one line.

    Args:
        strategy: the strategy of all replicas.
        mesh: of the run, with an axis `replica`.
        names: every weight that they exchange, in the model's order.
        device: of the weights.
    """

    def __init__(
        self, strategy: Strategy, mesh: Mesh, names: Sequence[str], device: torch.device
    ) -> None:
        self.strategy = strategy
        self.member = ReplicaMember(strategy, names, mesh.size("replica"))
        self.calls = Calls(self.member)
        self.between = Between(mesh, device, self.calls.answer)
        self._thread: ThreadPoolExecutor | None = None
        self._underway: dict[Round, Future[Message]] = {}
        self._arrived: dict[Round, Message] = {}
        self._told: set[int] = set()

    def start(self, weights: Weights, everything: Mapping[str, Tensor]) -> None:
        """Begin from `weights`, after a check that all replicas have the same state.

        Raises:
            CommError: on every rank, if replicas differ in `everything`, with the first such tensor.
        """
        self._check_same(everything)
        self.restart(weights)

    def restart(self, weights: Weights) -> None:
        """Begin anew from `weights`, which must be the same for all replicas."""
        self._drop()
        self.member.start(weights)
        self.calls.start(weights, self.between)

    def is_due(self, step: int) -> bool:
        """Whether a round begins or a result lands after `step`."""
        landing = any(due.lands == step for due in (*self._arrived, *self._underway))
        rounds = self.strategy.rounds(step, self.between.num_replicas)
        return landing or bool(rounds) or self.between.has_replies

    def after(self, step: int, weights: Weights, buffers: Weights) -> Weights:
        """The changes of this rank's weights and buffers after `step`, by name.

        Raises:
            CommError: a live replica does not come to a round in time, or the others have continued
                without this one.
        """
        now, changed = dict(weights), dict[str, Tensor]()

        def note(new: Weights) -> None:
            changed.update(new)
            now.update(new)

        for due in [due for due in (*self._arrived, *self._underway) if due.lands == step]:
            note(self.member.land(due, now, self._result(due)))
        for new in self.calls.landed(now, self.between):
            note(new)
        for due in self.strategy.rounds(step, self.between.num_replicas):
            if due.kind in CALLS:
                note(self.calls.begin(due, now, self.between))
                continue
            own, sent = self.member.begin(due, now, buffers)
            note(own)
            if due.lands == step:
                note(self.member.land(due, now, self._exchange(due, sent)))
            else:
                self._start(due, sent)
        self._tell()
        return changed

    def _exchange(self, due: Round, sent: Message) -> Message:
        if due.kind != MEAN:
            return self.between.push(due, sent)
        side = self._side(due, sent)
        received = self.between.mean(due, side)
        self.member.settle(side)
        return received

    def _side(self, due: Round, sent: Message) -> Mean:
        count = due.group or self.between.num_replicas
        return self.member.mean(sent, self.between.replica % count, count)

    def _tell(self) -> None:
        """Print one line for each lost replica, on the first remaining rank."""
        lost = {i: why for i, why in self.between.lost().items() if i not in self._told}
        self._told |= set(lost)
        for replica, why in lost.items():
            if self.between.speaks:
                left = ", ".join(map(str, self.between.here()))
                print(
                    f"replica {replica} is lost: {why}; of {self.between.num_replicas} replicas "
                    f"{left} go on",
                    file=sys.stderr,
                    flush=True,
                )

    def state(self) -> State:
        """The state that a resumed run needs for the same results; waits for exchanges in flight."""
        arrived = {due: self._result(due) for due in list(self._underway)}
        self._arrived |= arrived
        kept = {
            f"{_ARRIVED} {due.begins}.{name}": x
            for due, message in self._arrived.items()
            for name, x in message.items()
        }
        return self.member.state | kept

    def expected(self, weights: Weights, buffers: Weights, step: int) -> State:
        """The names, shapes and dtypes of `state` after `step`; the values mean nothing."""
        begin = self.strategy.init(weights)
        found = dict(begin)
        for k in range(max(1, step - self.strategy.longest_delay), step + 1):
            for due in self.strategy.rounds(k, self.between.num_replicas):
                if due.lands > step:
                    member = ReplicaMember(
                        self.strategy, self.member.names, self.between.num_replicas, dict(begin)
                    )
                    message = member.begin(due, weights, buffers)[1]
                    found |= {f"{_ARRIVED} {k}.{n}": x for n, x in message.items()}
        return found

    def load(self, state: State, step: int) -> None:
        """Continue from `state`, saved after `step`."""
        self._drop()
        self.calls.drop()
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
        """Receive and drop the exchanges in flight: the others have sent their messages."""
        for due in (*self._arrived, *self._underway):
            self._result(due)

    def _start(self, due: Round, sent: Message) -> None:
        """Start a round in the background; rounds run one after the other."""
        if not sent:  # neither this rank nor its counterparts hold any of the fragment
            self._arrived[due] = {}
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tutti-rounds")
        self._underway[due] = self._thread.submit(torch.no_grad()(self._exchange), due, sent)

    def _result(self, due: Round) -> Message:
        if due in self._arrived:
            return self._arrived.pop(due)
        return self._underway.pop(due).result()

    def _check_same(self, everything: Mapping[str, Tensor]) -> None:
        entries = [f"{n}: sha256 {digest(x)}" for n, x in everything.items()]
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
