"""Exchanges messages between the replicas of a run: among ranks that differ only in the axis `replica`.

replica=2 data=2        replica 0   rank 0   rank 1
                                       |        |         each pair exchanges its common shards
                        replica 1   rank 2   rank 3

Messages travel as letters (`comm.posts.post`), which still reach the other replicas after the loss of one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping

import torch

from tutti.comm.collectives.group import Group
from tutti.comm.collectives.groups import Groups
from tutti.comm.posts.letters import Letter
from tutti.comm.posts.lines import connect_lines
from tutti.comm.posts.post import RankPost
from tutti.errors import CommError
from tutti.layout import Mesh
from tutti.replicas.arrivals import CALL, REPLY, Arrivals, Arrived
from tutti.replicas.fellows import Fellows
from tutti.replicas.labels import check_labels, labelled
from tutti.replicas.mean import Mean
from tutti.replicas.meeting import Meeting
from tutti.replicas.pushes import Pushes
from tutti.replicas.replica_rows import replica_here, replica_of
from tutti.replicas.strategy import Round
from tutti.replicas.traces import APART, TRACE, Traces
from tutti.replicas.traffic import Message

# A replica's answer to another's call: (caller, key of the call, the call) -> reply.
Answer = Callable[[int, str, Message], Message]
_LEFT = "it has left"


class Between:
    """The exchanges of one rank with its counterparts in the other replicas; all ranks construct it together.

    Args:
        mesh: of the run; its axis `replica` is the outermost.
        device: of the weights.
        answer: computes the reply to a call; a method, which other threads call. Not used if a replica has
            several ranks: these answer together, by `arrived` and `reply`.
    """

    def __init__(self, mesh: Mesh, device: torch.device, answer: Answer) -> None:
        self.mesh, self.device, self._answer = mesh, device, weakref.WeakMethod(answer)
        self.num_replicas, self.replica = mesh.size("replica"), replica_here(mesh)
        axes: tuple[str, ...] = ("replica",)
        groups = Groups(dict(mesh.axes), [axes])
        self.group: Group = groups[axes]
        self._ranks = self.group.ranks
        timeout = groups.timeout.total_seconds()
        self._meeting = Meeting(self._ranks, self.replica, timeout)
        self._pushes = Pushes(self._ranks, self.replica, timeout)
        self.traces = Traces(self._ranks, self.replica, timeout)
        self._meeting.check = self._pushes.check = self.traces.check
        self._latest = -1, 0  # the step and the fragment of the last round
        self._repeats = 0  # how often the run has returned to an earlier one
        self._num_agreements, self._told_lost = 0, dict[int, str]()
        own = [r for r in range(mesh.num_ranks) if replica_of(mesh, r) == self.replica]
        self._together = len(own) > 1
        others = (self._ranks[: self.replica], self._ranks[self.replica + 1 :])
        self.fellows = Fellows(own, groups, self.give_up)
        self._arrivals = Arrivals(self.num_replicas, self.fellows)
        self.post = RankPost(connect_lines(*others, groups), self._take)
        self._meeting.post = self._pushes.post = self.traces.post = self.post

    def _take(self, rank: int, letter: Letter) -> Callable[[], None] | None:
        """Handle a letter; returns slow work, which the receiving thread runs later."""
        replica = self._ranks.index(rank)
        word, key = letter.topic.split(" ")[:2]
        message = dict(letter.tensors)
        if word in (TRACE, APART):
            self.traces.handle(replica, letter.topic)
        elif word == "push":
            self._pushes.handle(replica, key, message)
        elif word == "reply":
            self._arrivals.keep(REPLY, replica, key, message)
        elif word != "call":
            self._meeting.handle(replica, letter)
        elif self._together:
            self._arrivals.keep(CALL, replica, key, message)
        else:
            return functools.partial(self._answered, replica, key, message)
        return None

    def _answered(self, replica: int, key: str, message: Message) -> None:
        answer = self._answer()
        if answer is not None:
            self.reply(replica, key, answer(replica, key, message))

    def here(self) -> list[int]:
        """The remaining replicas, this one among them."""
        return [
            i for i, rank in enumerate(self._ranks) if i == self.replica or self.post.is_here(rank)
        ]

    def lost(self) -> dict[int, str]:
        """The lost replicas, also those lost to a fellow, in the order of their loss, and the reasons."""
        own = {self._ranks.index(rank): why for rank, why in self.post.lost.items()}
        return own | {i: why for i, why in self._told_lost.items() if i not in own}

    def left(self) -> list[int]:
        """The replicas that have left in good order."""
        return [self._ranks.index(rank) for rank in self.post.left]

    def missed(self) -> list[int]:
        """Those of them without which means have been made: after its last one any replica may leave."""
        return [replica for replica in self.left() if replica in self._meeting.absent]

    def gone(self) -> dict[int, str]:
        """The replicas that no longer remain, and the reasons.

        Raises:
            CommError: the others have given this one up.
        """
        self.post.check()
        here, lost = self.here(), self.lost()
        return {i: lost.get(i, _LEFT) for i in range(self.num_replicas) if i not in here}

    def agreed(self, *, late: bool) -> tuple[list[int], bool]:
        """The remaining replicas, and whether a rank of this one is `late`; all of its ranks call together.

        A replica without one rank is lost as a whole: this rank gives up those that its fellows have lost.

        Raises:
            CommError: the others have given this replica up, or it has lost a rank.
        """
        self._num_agreements += 1
        words = [f"{i} {why}" for i, why in self.gone().items()] + ["late"] * late
        said = self.fellows.count(f"remain {self._num_agreements}", words)
        late = bool(said.pop("late", 0))
        reasons = [word.partition(" ") for word in said]
        gone = {int(replica): why for replica, _, why in reasons}
        self.give_up(gone)
        return [i for i in range(self.num_replicas) if i not in gone], late

    def give_up(self, gone: Mapping[int, str]) -> None:
        """Ignore these replicas from now on, and tell them: other ranks of this one have lost them.

        A rank says goodbye when its process ends, also if that is for the loss of another rank.
        """
        for replica, why in gone.items():
            self.post.give_up(self._ranks[replica], why)
            if why != _LEFT:
                self._told_lost.setdefault(replica, why)

    @property
    def speaks(self) -> bool:
        """Whether this is the first rank of the remaining replicas."""
        here = self.mesh.coordinates(self._ranks[self.replica])
        first = not any(n for axis, n in here.items() if axis != "replica")
        return first and self.replica == self.here()[0]

    def mean(self, due: Round, side: Mean, label: Mapping[str, str]) -> Message:
        """The result of a mean; waits for the remaining replicas of the round.

        All parts, on all ranks of this replica, have the numbers of the same replicas: if one is lost
        half-way, the round repeats without it. `label` is that of `labels.labelled`.

        Raises:
            CommError: a live replica does not come in time, or the others have given this one up; or replicas
                send other weights; or this one has lost a rank.
        """
        members = range(self.num_replicas)
        if due.group:
            first = self.replica // due.group * due.group
            members = range(first, first + due.group)

        def combine(part: int, messages: list[Message]) -> Message:
            check_labels(due.begins, messages)
            return side.combine(part, messages)

        parts, once = [labelled(part, label) for part in side.parts], self._key(due)
        attempt = 0
        while True:
            key = f"{once}.{attempt}"
            found = self._meeting.mean(key, members, parts, combine)
            self.fellows.tell(self.lost())
            count = self.fellows.count(
                f"mean {key}", [",".join(map(str, of)) for of in {of for _, of in found}]
            )
            if len(count) == 1:
                break
            of = [{*map(int, word.split(","))} for word in count]
            self._go_on_with(set.intersection(*of), set.union(*of))
            attempt += 1
        self.post.flush()  # the messages may be views of the weights
        received = side.assemble([message for message, _ in found])
        return {n: x.to(self.device) for n, x in received.items()}

    def _key(self, due: Round) -> str:
        """The name of a round on all ranks; another one if the run has returned to an earlier checkpoint."""
        this = due.begins, due.fragment
        self._repeats += this <= self._latest
        self._latest = this
        return f"{due.begins}.{due.fragment}.{self._repeats}"

    def _go_on_with(self, common: set[int], some: set[int]) -> None:
        """Give up the replicas that only some ranks, or parts, have heard."""
        if self.replica not in common:
            raise CommError(
                "the other replicas have gone on without this one",
                why="they have not heard all of its ranks",
                fix="if a process is stopped now and then, set TUTTI_LEASE to more seconds",
            )
        self.give_up(dict.fromkeys(some - common, "one of its ranks is lost"))

    def push(self, due: Round, sent: Message, label: Mapping[str, str]) -> Message:
        """Send to the replica `hop` places on, or the next remaining one; the sum of messages received.

        A message counts if all ranks of this replica have received theirs, and one without a receiver comes
        back. `label` and errors are those of `mean`.
        """
        mine, key = labelled(sent, label), self._key(due)
        received = self._pushes.push(key, due.hop, mine)
        self.fellows.tell(self.lost())
        count = self.fellows.count(f"push {key}", [str(i) for i in received])
        messages = [m for i, m in received.items() if count[str(i)] == self.fellows.size]
        check_labels(due.begins, [mine, *messages])
        return {
            n: sum((m[n].to(x.device) for m in messages), torch.zeros_like(x))
            for n, x in sent.items()
        }

    def call(self, replica: int, key: str, message: Message) -> None:
        """Call another replica; `arrived` returns its answer later."""
        self.post.send(self._ranks[replica], f"call {key}", message)

    def reply(self, replica: int, key: str, message: Message) -> None:
        """Reply to another's call."""
        self.post.send(self._ranks[replica], f"reply {key}", message)

    @property
    def may_have_arrived(self) -> bool:
        """Whether to look at `arrived`; the same on all ranks of this replica."""
        return self._together or self._arrivals.has_replies

    def arrived(self) -> Arrived:
        """The replies since the last look, and the calls if this replica has several ranks.

        All of its ranks call this together, and get the same; the rest comes later.

        Raises:
            CommError: the others have given this replica up, or it has lost a rank.
        """
        gone = self.gone()
        self.fellows.tell(self.lost())
        found = self._arrivals.take(gone, self.post)
        for _, _, reply in found.replies:
            reply.update({n: x.to(self.device) for n, x in reply.items()})
        return found
