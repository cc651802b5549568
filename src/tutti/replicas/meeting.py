"""A mean among the remaining replicas: a round completes even if it loses a replica.

Each replica sends its numbers of part j to the owner of part j, which sends back the mean (`mean.Mean`). The
owner of part j is replica j, or the next remaining one. It averages the numbers of all senders, and omits a
replica lost before it has sent. A new owner asks the others for their numbers, or for the mean if one has it
already; a replica without the mean asks the new owner for it. So all continue with the same mean, even if the
owner was lost while it sent the mean.

    replica 0      part 1 -> 1    1 lost                           <- mean of part 1 from 2
    replica 2      part 1 -> 1    1 lost   ask 0    <- part 1 of 0  -> mean of part 1

A replica that has been asked ignores the lost owner from then on. A replica keeps the means of the last round
that it has closed: no other is further behind, as a round needs a message of all.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tutti.comm.posts.letters import Letter
from tutti.errors import CommError
from tutti.replicas.counterparts import Counterparts
from tutti.replicas.traffic import Message

Combine = Callable[[int, list[Message]], Message]
# The mean of a part, and the replicas whose numbers it has.
PartMean = tuple[Message, tuple[int, ...]]
# Closed rounds with their means, and without: letters of the latter come late.
_KEPT, _REMEMBERED = 1, 16
_ASK_SECONDS = 0.3


@dataclass
class _Round:
    """The state of one mean: `members` and `parts` once this replica has reached it."""

    members: tuple[int, ...] = ()
    parts: list[Message] | None = None
    sent: dict[int, dict[int, Message]] = field(default_factory=dict)  # part -> replica -> numbers
    means: dict[int, PartMean] = field(default_factory=dict)
    asked: set[tuple[int, int]] = field(default_factory=set)  # (replica, part)


class Meeting(Counterparts):
    """The means of one rank and its counterparts in the other replicas.

    Attributes:
        absent: the replicas without which this one has computed its part of a mean.
        check: called while it waits; raises where the others do not come.
    """

    def __init__(self, ranks: Sequence[int], replica: int, timeout_seconds: float) -> None:
        super().__init__(ranks, replica, timeout_seconds)
        self._rounds: OrderedDict[str, _Round] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()
        self.absent: set[int] = set()
        self.check: Callable[[], None] = lambda: None

    def handle(self, replica: int, letter: Letter) -> None:
        """Handle a letter of this protocol; the caller holds the post's lock."""
        word, key, part, *of = letter.topic.split(" ")
        if key in self._closed and (key not in self._rounds or word == "part"):
            return
        now, j = self._rounds.setdefault(key, _Round()), int(part)
        if word == "part":
            now.sent.setdefault(j, {})[replica] = dict(letter.tensors)
        elif word == "mean":
            now.means.setdefault(j, (dict(letter.tensors), tuple(map(int, of))))
        elif word == "want":
            if j in now.means:
                self._send_mean(replica, key, j, now.means[j])
        elif now.parts is None:
            now.asked.add((replica, j))
        else:
            self._answer(key, now, replica, j)

    def mean(
        self, key: str, members: Sequence[int], parts: list[Message], combine: Combine
    ) -> list[PartMean]:
        """The mean of every part over the remaining `members`: for each part, the same on all of them.

        Raises:
            CommError: a live replica does not come in time, or the others have given this one up.
        """
        post = self._the_post()
        with post.changed:
            now = self._rounds.setdefault(key, _Round())
            now.members, now.parts = tuple(members), parts
            for replica, j in now.asked:
                self._answer(key, now, replica, j)
            for j, part in enumerate(parts):
                if (owner := self._owner(now, j)) != self._replica:
                    self._send(owner, f"part {key} {j}", part)
        self._carry_out(key, now, combine)
        with post.changed:
            now.parts, now.sent = [], {}  # the means answer all that may still come
            self._closed[key] = None
            for old in list(self._closed)[:-_KEPT]:
                self._rounds.pop(old, None)
            while len(self._closed) > _REMEMBERED:
                self._closed.popitem(last=False)
        return [now.means[j] for j in range(len(parts))]

    def _carry_out(self, key: str, now: _Round, combine: Combine) -> None:
        post = self._the_post()
        deadline = post.seconds + self._timeout
        ask_at = 0.0
        while True:
            self.check()
            with post.changed:
                post.check()
                ready = self._ready(now)
                if not ready and len(now.means) == len(now.members):
                    return
                if not ready:
                    post.changed.wait(_ASK_SECONDS)
                    if time.monotonic() > ask_at:
                        self._ask(key, now)
                        ask_at = time.monotonic() + _ASK_SECONDS
            for j, sent in ready:
                self._publish(key, now, j, (combine(j, [*sent.values()]), tuple(sent)))
            if post.seconds > deadline:
                raise self._late(key, now)

    def _ready(self, now: _Round) -> list[tuple[int, dict[int, Message]]]:
        """The parts that this replica owns and has all messages of, without those of lost replicas."""
        assert now.parts is not None
        found = []
        for j in range(len(now.members)):
            if j in now.means or self._owner(now, j) != self._replica:
                continue
            sent = now.sent.get(j, {}) | {self._replica: now.parts[j]}
            if all(i in sent or not self._is_here(i) for i in now.members):
                found.append((j, {i: sent[i] for i in now.members if i in sent}))
                self.absent |= {i for i in now.members if i not in sent}
        return found

    def _publish(self, key: str, now: _Round, j: int, mean: PartMean) -> None:
        with self._the_post().changed:
            if j in now.means:
                return
            now.means[j] = mean
            for i in now.members:
                if i != self._replica:
                    self._send_mean(i, key, j, mean)

    def _ask(self, key: str, now: _Round) -> None:
        """Recover the parts of lost owners: a new owner asks the others for numbers, and these ask it for the
        mean, which it may have already after it has closed the round."""
        for j, first in enumerate(now.members):
            owner = self._owner(now, j)
            if j in now.means or owner == first:
                continue
            if owner != self._replica:
                self._send(owner, f"want {key} {j}", {})
                continue
            for i in now.members:
                if i != self._replica and i not in now.sent.get(j, {}):
                    self._send(i, f"ask {key} {j}", {})

    def _answer(self, key: str, now: _Round, replica: int, j: int) -> None:
        """Send the numbers or the mean of part j to its new owner; give up the earlier owners."""
        assert now.parts is not None
        for i in self._after(now, j):
            if i == replica:
                break
            if self._is_here(i) and i != self._replica:
                self._the_post().give_up(self._ranks[i], f"replica {replica} has lost it")
        if j in now.means:
            self._send_mean(replica, key, j, now.means[j])
        else:
            self._send(replica, f"part {key} {j}", now.parts[j])

    def _owner(self, now: _Round, j: int) -> int:
        return next(i for i in self._after(now, j) if self._is_here(i))

    def _after(self, now: _Round, j: int) -> tuple[int, ...]:
        return now.members[j:] + now.members[:j]

    def _send_mean(self, replica: int, key: str, j: int, mean: PartMean) -> None:
        message, of = mean
        self._send(replica, " ".join(["mean", key, str(j), *map(str, of)]), message)

    def _send(self, replica: int, topic: str, message: Message) -> None:
        self._the_post().send(self._ranks[replica], topic, message)

    def _late(self, key: str, now: _Round) -> CommError:
        missing = {now.members[j] for j in range(len(now.members)) if j not in now.means}
        missing |= {i for i in now.members for sent in now.sent.values() if i not in sent}
        names = ", ".join(str(i) for i in sorted(missing - {self._replica}) if self._is_here(i))
        return CommError(
            f"replicas {names} did not join the mean after step {key.split('.')[0]} within "
            f"{self._timeout:g} s",
            fix="if a replica is only slow, set TUTTI_TIMEOUT to more seconds",
        )
