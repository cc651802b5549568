"""Calls and replies of other replicas that wait for the next step; the ranks of a replica take the same ones.

rank 0   reply of 1     call of 2     call of 3
rank 1   reply of 1                   call of 3           both take the reply of 1 and the call of 3
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tutti.comm.posts.post import RankPost
from tutti.replicas.fellows import Fellows
from tutti.replicas.traffic import Message

CALL, REPLY = "call", "reply"


@dataclass
class Arrived:
    """What has come from other replicas: (replica, key, message) each, in the order of their effects.

    `here` are the remaining replicas.
    """

    here: list[int]
    calls: list[tuple[int, str, Message]] = field(default_factory=list)
    replies: list[tuple[int, str, Message]] = field(default_factory=list)


class Arrivals:
    """One rank's calls and replies from its counterparts in the other replicas.

    Args:
        num_replicas: of the run.
        fellows: the ranks of this replica.
    """

    def __init__(self, num_replicas: int, fellows: Fellows) -> None:
        self._num_replicas, self._fellows = num_replicas, fellows
        self._waiting: dict[str, dict[tuple[int, str], Message]] = {CALL: {}, REPLY: {}}
        self._num_looks = 0

    def keep(self, kind: str, replica: int, key: str, message: Message) -> None:
        """Keep a letter for the next look; the caller holds the post's lock."""
        self._waiting[kind][replica, key] = message

    @property
    def has_replies(self) -> bool:
        """Whether this rank has a reply."""
        return bool(self._waiting[REPLY])

    def take(self, gone: Collection[int], post: RankPost) -> Arrived:
        """The letters that all ranks of this replica have; they call this together.

        Args:
            gone: the replicas that no longer remain for this rank.
            post: this rank's.

        Raises:
            CommError: this replica has lost a rank.
        """
        with post.changed:
            words = {
                f"{kind} {replica} {key}": (kind, replica, key)
                for kind, found in self._waiting.items()
                for replica, key in found
            }
        self._num_looks += 1
        said = [*words, *(f"gone {i}" for i in gone)]
        count = self._fellows.count(f"arrived {self._num_looks}", said)
        here = [i for i in range(self._num_replicas) if not count[f"gone {i}"]]
        common = [words[word] for word in sorted(words) if count[word] == self._fellows.size]
        with post.changed:
            found = Arrived(
                here,
                [*self._taken(CALL, common, here)],
                [*self._taken(REPLY, common, range(self._num_replicas))],
            )
            for waiting in self._waiting.values():
                for replica, key in [at for at in waiting if at[0] not in here]:
                    del waiting[replica, key]
        return found

    def _taken(
        self, kind: str, common: Collection[tuple[str, int, str]], callers: Collection[int]
    ) -> Iterator[tuple[int, str, Message]]:
        for one, replica, key in common:
            if one == kind and replica in callers:
                yield replica, key, self._waiting[kind].pop((replica, key))
