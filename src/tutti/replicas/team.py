"""One rank's exchanges with the other replicas of a run, after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tutti.comm.collectives.agree import check_order
from tutti.comm.collectives.payload import digest
from tutti.errors import CommError
from tutti.layout import Mesh
from tutti.replicas.between import Between
from tutti.replicas.calls import Calls
from tutti.replicas.gossip import MASS
from tutti.replicas.mean import Mean
from tutti.replicas.member import ReplicaMember
from tutti.replicas.roster import Roster, Shapes
from tutti.replicas.strategy import CALLS, MEAN, Round, State, Strategy, Weights
from tutti.replicas.traffic import Message

# Results received but not landed, in a checkpoint: "arrived 96.2.weight"; and the roster.
_ARRIVED = "arrived"
ROSTER = "roster"


class Team:
    """Plays a strategy on this rank; all ranks of the run construct it together.

    Between rounds no rank waits for another replica. An exchange whose result lands later overlaps the
    computation. The strategy omits a replica that is lost, or has left, from then on; the first
    remaining one tells one line.

    Args:
        strategy: the strategy of all replicas.
        mesh: of the run, with an axis `replica`.
        device: of the weights.
        tell: shows the user a line.
    """

    def __init__(
        self, strategy: Strategy, mesh: Mesh, device: torch.device, tell: Callable[[str], None]
    ) -> None:
        self.strategy, self._show = strategy, tell
        self.member = ReplicaMember(strategy, mesh.size("replica"))
        self.calls = Calls(self.member)
        self.between = Between(mesh, device, self.calls.answer)
        self._asynchronous = bool(strategy.answers_from)
        self._thread: ThreadPoolExecutor | None = None
        self._underway: dict[Round, Future[Message]] = {}
        self._arrived: dict[Round, Message] = {}
        self._told: set[int] = set()
        self._compared: set[str] = set()  # the weights that replicas have compared as they are
        self._hashes: dict[str, str] = {}  # of weights that have joined, until their first round
        self.restart()

    @property
    def roster(self) -> Roster:
        """The weights that replicas exchange."""
        return self.member.roster

    def start(self, everything: Mapping[str, Tensor]) -> None:
        """Check that all replicas have the same values of some state before their first round.

        Raises:
            CommError: on every rank, if replicas differ in `everything`, with the first such tensor.
        """
        self._check_same(everything)
        self._compared |= {*everything}

    def restart(self) -> None:
        """Begin anew: weights join as the next steps train them, with the same values on all replicas."""
        self._drop()
        self.member.start()
        self.calls.start(self.between)
        self._hashes.clear()
        self._compared = set()

    def before(self, step: int, trained: Shapes, weights: Callable[[], Weights]) -> None:
        """Let the weights join that `step` trains first.

        Args:
            trained: all weights that the step trains.
            weights: returns those of this rank, with their values before the step.

        Raises:
            LayoutError: replicas cannot average one of them.
        """
        self.between.traces.call(step)
        if shapes := self.member.roster.lacks(trained):
            now = weights()
            own = {n: now[n] for n in shapes if n in now}
            with self.member.lock:
                begun = self.member.join(shapes, own, step)
                self.calls.join(own)
            if self.strategy.settles and begun:
                new = {n: x for n, x in own.items() if n not in self._compared}
                self._hashes |= {n: digest(x) for n, x in new.items()}
        self._compared = set()
        self.member.roster.train(trained, step)

    def is_due(self, step: int) -> bool:
        """Whether a round begins or a result lands after `step`."""
        landing = any(due.lands == step for due in (*self._arrived, *self._underway))
        rounds = self.strategy.rounds(step, self.between.num_replicas)
        return landing or bool(rounds) or (self._asynchronous and self.between.may_have_arrived)

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

        self.calls.check(step)
        left, missed = self.between.left(), set[int]()
        for due in [due for due in (*self._arrived, *self._underway) if due.lands == step]:
            note(self.member.land(due, now, self._result(due)))
        if self._asynchronous:
            for new in self.calls.receive(now, self.between):
                note(new)
        for due in self.strategy.rounds(step, self.between.num_replicas):
            if due.kind != MEAN:
                missed |= set(left)
            if due.kind in CALLS:
                note(self.calls.begin(due, now, self.between))
                continue
            label = {n: self._hashes.pop(n, "") for n in self.member.part(due)}
            own, sent = self.member.begin(due, now, buffers)
            note(own)
            if due.lands != step:
                self._start(due, sent, label)
                continue
            received = self._exchange(due, sent, label)
            del own, sent  # room for the new weights
            note(self.member.land(due, now, received))
        missed |= set(self.between.missed())
        self._tell(dict.fromkeys(sorted(missed), f"has left by step {step}"))
        return changed

    def _exchange(self, due: Round, sent: Message, label: Mapping[str, str]) -> Message:
        if due.kind != MEAN:
            return self.between.push(due, sent, label)
        side = self._side(due, sent)
        received = self.between.mean(due, side, label)
        self.member.settle(side)
        return received

    def _side(self, due: Round, sent: Message) -> Mean:
        count = due.group or self.between.num_replicas
        return self.member.mean(sent, self.between.replica % count, count)

    def _tell(self, left: Mapping[int, str]) -> None:
        """Tell one line for each lost replica, and for each that has `left`, on the first remaining rank."""
        lost = {i: f"is lost: {why}" for i, why in self.between.lost().items()}
        new = {i: how for i, how in {**left, **lost}.items() if i not in self._told}
        self._told |= set(new)
        for replica, how in new.items():
            if self.between.speaks:
                here = self.between.here()
                one = len(here) == 1
                named = ", ".join(map(str, here))
                rest = f"replica {named} goes on" if one else f"replicas {named} go on"
                self._show(f"replica {replica} {how}; {rest} (of {self.between.num_replicas})")

    def state(self) -> State:
        """The state that a resumed run needs for the same results; waits for exchanges in flight."""
        arrived = {due: self._result(due) for due in list(self._underway)}
        self._arrived |= arrived
        kept = {
            f"{_ARRIVED} {due.begins}.{name}": x
            for due, message in self._arrived.items()
            for name, x in message.items()
        }
        return self.member.copy() | kept | {ROSTER: self.member.roster.packed()}

    def load(self, state: State, step: int, weights: Weights) -> None:
        """Continue from `state`, saved after `step`; `weights` are this rank's."""
        self.restart()
        state = dict(state)
        self.member.roster = Roster.unpacked(state.pop(ROSTER))
        self.member.state = {n: x for n, x in state.items() if not n.startswith(_ARRIVED)}
        for names in self.member.roster.generations():
            self.calls.join({n: weights[n] for n in names if n in weights})
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

    def _start(self, due: Round, sent: Message, label: Mapping[str, str]) -> None:
        """Start a round in the background; rounds run one after the other."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tutti-rounds")
        self._underway[due] = self._thread.submit(torch.no_grad()(self._exchange), due, sent, label)

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
                why=f"{error.why}\n       the first call of a step sends rank 0's values to all ranks, "
                "but not of state that an earlier call has laid out",
                fix="change weights between calls on every rank alike",
            ) from None


def _begins(name: str) -> int:
    return int(name.split(".")[0].split(" ")[1])


def weight_of(key: str) -> str:
    """The weight or buffer that an entry of `Team.state` belongs to; "" for the roster."""
    return key.partition(".")[2].removeprefix(MASS)
