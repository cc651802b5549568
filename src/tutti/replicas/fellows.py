"""The ranks of one replica agree on what they have received from the other replicas.

Each rank exchanges messages with its counterparts alone, so the loss of another replica, or a reply, reaches
the ranks of one replica at different steps. Their results must be the same: they may hold the same weights.

          0            Ranks form a tree; each has a line to its parent and its children.
        1   2          up: how many ranks below have said each word
       3 4             down: how many of all ranks have

The loss of another replica also goes to all ranks at once, as they may wait for a message of that replica.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from tutti.comm.collectives.groups import Groups
from tutti.comm.posts.letters import Letter
from tutti.comm.posts.lines import connect_lines
from tutti.comm.posts.post import RankPost
from tutti.errors import CommError
from tutti.replicas.traffic import Message

_LOOK_SECONDS = 0.5
_TEXT = "text"


class Fellows:
    """The ranks of this rank's replica; all ranks of the run construct it together.

    Args:
        ranks: of this replica, ascending.
        groups: of the run.
        give_up: ignores other replicas, by the reasons; a method, which other threads call.
    """

    def __init__(
        self, ranks: Sequence[int], groups: Groups, give_up: Callable[[Mapping[int, str]], None]
    ) -> None:
        self.size, self._timeout = len(ranks), groups.timeout.total_seconds()
        self._give_up = weakref.WeakMethod(give_up)
        self._said: dict[str, dict[int, Counter[str]]] = {}
        self._told: set[int] = set()
        self._above, self._below = neighbours(ranks, groups.rank)
        self.post: RankPost | None = None
        if self.size > 1:
            lines = connect_lines(self._above, self._below, groups)
            self.post = RankPost(lines, self._take)

    def count(self, key: str, words: Collection[str]) -> Counter[str]:
        """How many ranks of the replica say each word; all of them call this together with the same `key`.

        Raises:
            CommError: a rank of the replica is lost, or does not come in time.
        """
        total = Counter(set(words))
        if self.post is None:
            return total
        for rank in self._below:
            total.update(self._from(rank, key))
        for rank in self._above:
            self._send(rank, f"count {key}", total)
            total = self._from(rank, key)
        for rank in self._below:
            self._send(rank, f"count {key}", total)
        with self.post.changed:
            self._said.pop(key, None)
        return total

    def tell(self, lost: Mapping[int, str]) -> None:
        """Have all ranks of this replica give up these replicas, by the reasons; they may be waiting."""
        if self.post is None:
            return
        with self.post.changed:
            new = {i: why for i, why in lost.items() if i not in self._told}
            self._told |= set(new)
        if new:
            for rank in (*self._above, *self._below):
                self._send(rank, "lost", new)

    def _take(self, rank: int, letter: Letter) -> Callable[[], None] | None:
        """Handle a letter; returns slow work, which the receiving thread runs later."""
        word, _, key = letter.topic.partition(" ")
        said = _read(letter.tensors)
        if word == "count":
            self._said.setdefault(key, {})[rank] = Counter(said)
            return None
        return functools.partial(self._heard, {int(i): why for i, why in said.items()})

    def _heard(self, lost: Mapping[int, str]) -> None:
        give_up = self._give_up()
        if give_up is not None:
            give_up(lost)
        self.tell(lost)

    def _send(self, rank: int, topic: str, said: Mapping[str, int] | Mapping[int, str]) -> None:
        assert self.post is not None
        self.post.send(rank, topic, _written(said))

    def _from(self, rank: int, key: str) -> Counter[str]:
        """The counts that a neighbour sends."""
        assert self.post is not None
        post, until = self.post, self.post.seconds + self._timeout
        with post.changed:
            while rank not in self._said.get(key, {}):
                if why := post.lost.get(rank, "" if post.is_here(rank) else "it has ended"):
                    raise CommError(
                        f"rank {rank} of this replica is lost",
                        why=why,
                        fix="a replica ends with the first of its ranks; the other replicas go on",
                    )
                if post.seconds > until:
                    raise CommError(
                        f"rank {rank} did not agree with its replica within {self._timeout:g} s",
                        why="the ranks of a replica agree on the lost replicas after each exchange",
                        fix="if it is only slow, set TUTTI_TIMEOUT to more seconds",
                    )
                post.changed.wait(_LOOK_SECONDS)
            return self._said[key][rank]


def neighbours(ranks: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
    """The parent of a rank in the tree, if any, and its children."""
    me = ranks.index(rank)
    above = [ranks[(me - 1) // 2]] if me else []
    return above, [ranks[k] for k in (2 * me + 1, 2 * me + 2) if k < len(ranks)]


def _written(said: Mapping[str, int] | Mapping[int, str]) -> Message:
    text = bytearray(json.dumps(said).encode())
    return {_TEXT: torch.frombuffer(text, dtype=torch.uint8)}


def _read(message: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return dict(json.loads(bytes(message[_TEXT].tolist())))
