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
from tutti.comm.posts.post import RankPost, lease_seconds
from tutti.errors import CommError
from tutti.layout import Mesh
from tutti.replicas.labels import check_labels, labelled
from tutti.replicas.mean import Mean
from tutti.replicas.meeting import Meeting
from tutti.replicas.replica_rows import replica_here
from tutti.replicas.strategy import Round
from tutti.replicas.traffic import Message

# A replica's answer to another's call: (caller, key of the call, the call) -> reply.
Answer = Callable[[int, str, Message], Message]
_LOOK_SECONDS = 0.5
_LEFT = "it has left"


class Between:
    """The exchanges of one rank with its counterparts in the other replicas; all ranks construct it together.

    Args:
        mesh: of the run; its axis `replica` is the outermost.
        device: of the weights.
        answer: computes the reply to a call; a method, which other threads call.
    """

    def __init__(self, mesh: Mesh, device: torch.device, answer: Answer) -> None:
        self.mesh, self.device, self._answer = mesh, device, weakref.WeakMethod(answer)
        self.num_replicas, self.replica = mesh.size("replica"), replica_here(mesh)
        axes: tuple[str, ...] = ("replica",)
        groups = Groups(dict(mesh.axes), [axes])
        self.group: Group = groups[axes]
        self._ranks = self.group.ranks
        self._timeout = groups.timeout.total_seconds()
        self._meeting = Meeting(self._ranks, self.replica, self._timeout)
        self._pushed: dict[str, dict[int, Message]] = {}
        self._replies: list[tuple[int, str, Message]] = []
        self.post = RankPost(connect_lines(self._ranks, groups), self._take)
        self._meeting.post = self.post

    def _take(self, rank: int, letter: Letter) -> Callable[[], None] | None:
        """Handle a letter; returns slow work, which the receiving thread runs later."""
        replica = self._ranks.index(rank)
        word, key = letter.topic.split(" ")[:2]
        message = dict(letter.tensors)
        if word == "push":
            self._pushed.setdefault(key, {})[replica] = message
        elif word == "reply":
            self._replies.append((replica, key, message))
        elif word == "call":
            return functools.partial(self._reply, replica, key, message)
        else:
            self._meeting.handle(replica, letter)
        return None

    def _reply(self, replica: int, key: str, message: Message) -> None:
        answer = self._answer()
        if answer is not None:
            self.post.send(self._ranks[replica], f"reply {key}", answer(replica, key, message))

    def here(self) -> list[int]:
        """The remaining replicas, this one among them."""
        return [
            i for i, rank in enumerate(self._ranks) if i == self.replica or self.post.is_here(rank)
        ]

    def lost(self) -> dict[int, str]:
        """The lost replicas, in the order of their loss, and the reasons."""
        return {self._ranks.index(rank): why for rank, why in self.post.lost.items()}

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

    def give_up(self, gone: Mapping[int, str]) -> None:
        """Ignore these replicas from now on, and tell them: other ranks of this one have lost them."""
        for replica, why in gone.items():
            self.post.give_up(self._ranks[replica], why)

    @property
    def speaks(self) -> bool:
        """Whether this is the first rank of the remaining replicas."""
        here = self.mesh.coordinates(self._ranks[self.replica])
        first = not any(n for axis, n in here.items() if axis != "replica")
        return first and self.replica == self.here()[0]

    def mean(self, due: Round, side: Mean, label: Mapping[str, str]) -> Message:
        """The result of a mean; waits for the remaining replicas of the round.

        `label` is that of `labels.labelled`.

        Raises:
            CommError: a live replica does not come in time, or the others have given this one up; or replicas
                send other weights.
        """
        members = range(self.num_replicas)
        if due.group:
            first = self.replica // due.group * due.group
            members = range(first, first + due.group)
        key = f"{due.begins}.{due.fragment}"

        def combine(part: int, messages: list[Message]) -> Message:
            check_labels(due.begins, messages)
            return side.combine(part, messages)

        parts = [labelled(part, label) for part in side.parts]
        found = self._meeting.mean(key, members, parts, combine)
        self.post.flush()  # the messages may be views of the weights
        return {n: x.to(self.device) for n, x in side.assemble(found).items()}

    def push(self, due: Round, sent: Message, label: Mapping[str, str]) -> Message:
        """Send to the replica `hop` places on, or the next remaining one; the sum of messages received.

        A message without a receiver comes back. `label` and errors are those of `mean`.
        """
        mine = labelled(sent, label)
        to = self._target(self.replica, due.hop)
        if to is not None:
            self.post.send(self._ranks[to], f"push {due.begins}", mine)
        self._await_pushes(due)
        with self.post.changed:
            messages = list(self._pushed.pop(str(due.begins), {}).values())
        if to is None:
            messages.append(mine)
        self.post.flush()
        check_labels(due.begins, [mine, *messages])
        return {
            n: sum((m[n].to(x.device) for m in messages), torch.zeros_like(x))
            for n, x in sent.items()
        }

    def _await_pushes(self, due: Round) -> None:
        """Wait for the pushes of all senders to this replica; after a loss no longer than the lease."""
        begun = until = self.post.seconds
        until += self._timeout
        view = self._not_lost()
        while True:
            with self.post.changed:
                self.post.check()
                if view != self._not_lost():
                    view, until = self._not_lost(), min(until, self.post.seconds + lease_seconds())
                came = self._pushed.get(str(due.begins), {})
                missing = [
                    i
                    for i in view
                    if i != self.replica
                    and i not in came
                    and self.post.is_here(self._ranks[i])
                    and self._target(i, due.hop) == self.replica
                ]
                if not missing:
                    return
                self.post.changed.wait(_LOOK_SECONDS)
            if self.post.seconds > until:
                if until < begun + self._timeout:
                    return
                raise CommError(
                    f"replica {missing[0]} sent nothing after step {due.begins} within {self._timeout:g} s",
                    fix="if it is only slow, set TUTTI_TIMEOUT to more seconds",
                )

    def _target(self, replica: int, hop: int) -> int | None:
        here = self._not_lost()
        steps = range(hop, hop + self.num_replicas)
        after = ((replica + k) % self.num_replicas for k in steps)
        return next((i for i in after if i in here and i != replica), None)

    def _not_lost(self) -> list[int]:
        """All replicas but the lost; those that left in good order still count as senders and receivers."""
        lost = self.post.lost
        return [i for i, rank in enumerate(self._ranks) if rank not in lost]

    def call(self, replica: int, key: str, message: Message) -> None:
        """Call another replica; `replies` returns its answer later."""
        self.post.send(self._ranks[replica], f"call {key}", message)

    @property
    def has_replies(self) -> bool:
        """Whether `replies` has any."""
        return bool(self._replies)

    def replies(self) -> list[tuple[int, str, Message]]:
        """(replica, key, reply) for each reply since the last look."""
        with self.post.changed:
            self.post.check()
            found, self._replies = self._replies, []
        return [(i, key, {n: x.to(self.device) for n, x in m.items()}) for i, key, m in found]
