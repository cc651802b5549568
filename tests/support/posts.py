"""Ranks of one process that send each other letters through real sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from tutti.comm.posts.letters import Letter
from tutti.comm.posts.post import RankPost


class Desk:
    """One rank: its post, and the letters that have come."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], lease: float | None) -> None:
        self.rank, self.sockets = rank, sockets
        self.letters: list[tuple[int, Letter]] = []
        self.reply: Callable[[int, Letter], Callable[[], None] | None] = lambda rank, letter: None
        self.post = RankPost(sockets, self.take, lease)

    def take(self, rank: int, letter: Letter) -> Any:
        """The post's handler."""
        self.letters.append((rank, letter))
        return self.reply(rank, letter)

    def wait(self, met: Callable[[], bool], seconds: float = 20.0) -> None:
        """Until something is so."""
        with self.post.changed:
            assert self.post.changed.wait_for(met, seconds), "it never came"

    def die(self) -> None:
        """What the kernel does when a process is killed: what has been sent arrives, then an end."""
        for one in self.sockets.values():
            one.shutdown(socket.SHUT_RDWR)


def desks(count: int, lease: float | None = None) -> list[Desk]:
    """`count` ranks, each two of them connected."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for i in range(count):
        for j in range(i):
            ends[i][j], ends[j][i] = socket.socketpair()
    return [Desk(i, mine, lease) for i, mine in enumerate(ends)]
