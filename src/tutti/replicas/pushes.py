"""Pushes: each replica sends a message to the one some places on, and receives that of another.

replica 0 --> 1 --> 2 --> 0        hop 1: the next remaining replica, if that is lost
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tutti.comm.posts.post import lease_seconds
from tutti.errors import CommError
from tutti.replicas.counterparts import LOOK_SECONDS, Counterparts
from tutti.replicas.traffic import Message


class Pushes(Counterparts):
    """The pushes of one rank and its counterparts in the other replicas."""

    def __init__(self, ranks: Sequence[int], replica: int, timeout_seconds: float) -> None:
        super().__init__(ranks, replica, timeout_seconds)
        self._received: dict[str, dict[int, Message]] = {}
        self.check: Callable[[], None] = lambda: None  # called while it waits

    def handle(self, replica: int, key: str, message: Message) -> None:
        """Keep a message until its round; the caller holds the post's lock."""
        self._received.setdefault(key, {})[replica] = message

    def push(self, key: str, hop: int, mine: Message) -> dict[int, Message]:
        """Send `mine` in the round `key`; the messages of the round by their senders.

        A message without a receiver comes back. Waits for all senders to this replica; after a loss no
        longer than the lease.

        Raises:
            CommError: a live replica does not send in time, or the others have given this one up.
        """
        post = self._the_post()
        to = self._target(self._replica, hop)
        if to is not None:
            post.send(self._ranks[to], f"push {key}", mine)
        self._await(key, hop)
        with post.changed:
            messages = self._received.pop(key, {})
        if to is None:
            messages[self._replica] = mine
        post.flush()
        return dict(sorted(messages.items()))

    def _await(self, key: str, hop: int) -> None:
        post = self._the_post()
        begun = until = post.seconds
        until += self._timeout
        view = self._not_lost()
        while True:
            self.check()
            with post.changed:
                post.check()
                if view != self._not_lost():
                    view, until = self._not_lost(), min(until, post.seconds + lease_seconds())
                came = self._received.get(key, {})
                missing = [
                    i
                    for i in view
                    if i != self._replica
                    and i not in came
                    and post.is_here(self._ranks[i])
                    and self._target(i, hop) == self._replica
                ]
                if not missing:
                    return
                post.changed.wait(LOOK_SECONDS)
            if post.seconds > until:
                if until < begun + self._timeout:
                    return
                step, seconds = key.split(".")[0], f"{self._timeout:g} s"
                raise CommError(
                    f"replica {missing[0]} sent nothing after step {step} within {seconds}",
                    fix="if it is only slow, set TUTTI_TIMEOUT to more seconds",
                )

    def _target(self, replica: int, hop: int) -> int | None:
        count, here = len(self._ranks), self._not_lost()
        after = ((replica + k) % count for k in range(hop, hop + count))
        return next((i for i in after if i in here and i != replica), None)

    def _not_lost(self) -> list[int]:
        """All replicas but the lost; those that left in good order still count as senders and receivers."""
        lost = self._the_post().lost
        return [i for i, rank in enumerate(self._ranks) if rank not in lost]
