"""Letters between ranks: survivors detect a lost rank and continue.

Collectives of torch.distributed fail with the first lost rank. Here each pair of ranks has its own connection
with two threads at each end: one sends the letters of its queue, the other receives and calls the handler. So
a rank receives letters while it computes, and waits only if it chooses to.

    rank 0   queue -> sender ---+         +--- receiver -> handler
                                socket 0-1                            rank 1
             receiver <---------+         +--- sender <- queue

A rank is lost when its connection breaks (its process has ended), or when it has been silent for the lease,
in which a live rank sends at least five heartbeats. The others tell it so, in case it lives, and ignore it
from then on. A rank that was suspended itself counts from its resumption. A rank that leaves in good order
says goodbye.

Ranks of one host use Unix sockets, others TCP. Both ends prove that they know the run's secret, which the
run's own rendezvous distributes; the letters are neither encrypted nor signed.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tutti.comm.host.awake import AwakeClock
from tutti.comm.posts import letters
from tutti.comm.posts.letters import Letter
from tutti.environment import LEASE
from tutti.errors import CommError

# Heartbeats per lease. The clock counts in the same intervals, so one or two late ones do no harm.
BEATS = 5
# How long an ending process waits until its last letters have left.
_LEAVE_SECONDS = 2.0
_CLOSED = "its connection has closed"

# (sender, letter), called with the post's lock held: it must not wait. The receiving thread runs the
# returned function without the lock, before the next letter of that sender.
Handler = Callable[[int, Letter], Callable[[], None] | None]


def lease_seconds() -> float:
    """How long a rank may be silent before it is lost: `TUTTI_LEASE` seconds, 5 by default."""
    return LEASE.read()


@dataclass
class _Line:
    """The connection to one rank."""

    rank: int
    socket: socket.socket
    queue: queue.SimpleQueue[list[memoryview] | None] = field(default_factory=queue.SimpleQueue)
    heard: float = 0.0
    pending: int = 0
    nbytes: int = 0
    gone: str = ""  # the reason, once this rank ignores the other


class _Hub:
    """The shared state of a post's threads; it must not keep the post itself alive."""

    def __init__(self, lines: Sequence[_Line], lease: float, handler: Handler) -> None:
        self.changed = threading.Condition()
        self.lines = {line.rank: line for line in lines}
        self.lost: dict[int, str] = {}
        self.left: list[int] = []
        self.refused = ""
        self.closed = False
        self.seconds = 0.0
        self._lease = lease
        self._beat = min(1.0, lease / BEATS)
        self._handler: Any = weakref.WeakMethod(handler)  # type: ignore[arg-type]

    def start(self) -> None:
        works = [
            (target, (line,))
            for line in self.lines.values()
            for target in (self.send, self.receive)
        ]
        for target, args in [*works, (self.watch, ())]:
            threading.Thread(target=target, args=args, name="tutti-post", daemon=True).start()

    def send(self, line: _Line) -> None:
        """A thread: sends the queue's letters, and heartbeats between them."""
        try:
            while True:
                try:
                    parts = line.queue.get(timeout=self._beat)
                except queue.Empty:
                    line.socket.sendall(letters.BEAT)
                    continue
                if parts is None:
                    break
                for part in parts:
                    line.socket.sendall(part)
                with self.changed:
                    line.pending -= 1
                    line.nbytes += sum(len(part) for part in parts)
                    self.changed.notify_all()
            line.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.lose(line, _why(error))

    def receive(self, line: _Line) -> None:
        """A thread: receives letters and heartbeats until the other end closes."""
        try:
            while kind := line.socket.recv(1):
                line.heard = self.seconds
                if kind == letters.LETTER:
                    self._deliver(line, self._letter(line))
                elif kind == letters.OUT:
                    self._refuse(line)
                elif kind == letters.BYE:
                    self.lose(line, "", left=True)
                elif kind != letters.BEAT:
                    raise ValueError(f"a letter of unknown kind {kind!r}")
            self.lose(line, _CLOSED)
        except (OSError, ValueError, TypeError) as error:
            self.lose(line, _why(error))

    def watch(self) -> None:
        """A thread: counts time by its own sleeps, so that a resumed rank does not suspect the others."""
        clock = AwakeClock(self._beat)
        while not self.closed:
            time.sleep(self._beat)
            self.seconds = clock.look()
            for line in list(self.lines.values()):
                if not line.gone and self.seconds - line.heard > self._lease:
                    self.lose(line, f"no sign of life for {self._lease:g} s", tell=True)

    def lose(self, line: _Line, why: str, *, left: bool = False, tell: bool = False) -> None:
        """Ignore a rank from now on."""
        with self.changed:
            if line.gone or self.closed:
                return
            line.gone = why or "it has left"
            if left:
                self.left.append(line.rank)
            else:
                self.lost[line.rank] = line.gone
            if tell:
                line.queue.put([memoryview(letters.OUT)])
            line.queue.put(None)
            self.changed.notify_all()
        if not left and not tell:
            with suppress(OSError):  # it may be closed already
                line.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Say goodbye; returns when all letters have left, or after a limit."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            open_lines = [line for line in self.lines.values() if not line.gone]
            for line in open_lines:
                line.pending += 1
                line.queue.put([memoryview(letters.BYE)])
                line.queue.put(None)
            self.changed.wait_for(
                lambda: not any(x.pending and not x.gone for x in open_lines),
                timeout=_LEAVE_SECONDS,
            )

    def _refuse(self, line: _Line) -> None:
        with self.changed:
            self.refused = f"rank {line.rank} had no sign of life from here for {self._lease:g} s"
            self.changed.notify_all()

    def _deliver(self, line: _Line, letter: Letter) -> None:
        work = None
        with self.changed:
            handler = self._handler()
            if not line.gone and not self.closed and handler is not None:
                work = handler(line.rank, letter)
                self.changed.notify_all()
        if work is not None:
            work()

    def _letter(self, line: _Line) -> Letter:
        header_size, size = letters.SIZES.unpack(bytes(self._take(line, letters.SIZES.size)))
        if header_size > letters.MAX_HEADER or size > letters.MAX_PAYLOAD:
            raise ValueError("a letter larger than any may be")
        topic, entries = letters.read_header(bytes(self._take(line, header_size)))
        payload = torch.empty(size, dtype=torch.uint8)
        self._take(line, size, memoryview(payload.numpy()))  # type: ignore[arg-type]
        return Letter(topic, letters.read_payload(entries, payload))

    def _take(self, line: _Line, size: int, into: memoryview | None = None) -> memoryview:
        view = memoryview(bytearray(size)) if into is None else into
        begin = 0
        while begin < size:
            count = line.socket.recv_into(view[begin:])
            if not count:
                raise ValueError(_CLOSED)
            line.heard = self.seconds
            begin += count
        return view


class RankPost:
    """The connections of this rank.

    Args:
        lines: an open socket to each other rank.
        handler: handles a letter; a thread of the post calls it with `changed` held. It must be a
            method, whose object the post does not keep alive.
        lease: seconds of silence after which a rank is lost.

    The post notifies the condition `changed` after each handled letter and each rank that goes.
    """

    def __init__(
        self, lines: Mapping[int, socket.socket], handler: Handler, lease: float | None = None
    ) -> None:
        made = [_Line(rank, one) for rank, one in lines.items()]
        self._hub = _Hub(made, lease_seconds() if lease is None else lease, handler)
        self.changed = self._hub.changed
        self.close = weakref.finalize(self, self._hub.close)
        self._hub.start()

    def send(self, to: int, topic: str, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Queue a letter; a letter to a lost rank is dropped.

        CPU tensors must not change until `flush` has returned, or the receiver has answered.
        """
        line = self._hub.lines[to]
        parts = letters.to_bytes(Letter(topic, tensors or {}))
        with self.changed:
            if not line.gone:
                line.pending += 1
                line.queue.put(parts)

    def flush(self) -> None:
        """Return when every letter has left this process, or its receiver has gone."""
        with self.changed:
            lines = self._hub.lines.values()
            self.changed.wait_for(lambda: not any(x.pending and not x.gone for x in lines))

    def is_here(self, rank: int) -> bool:
        """Whether this rank still receives from `rank`."""
        return not self._hub.lines[rank].gone

    def give_up(self, rank: int, why: str) -> None:
        """Ignore `rank` from now on, and tell it."""
        self._hub.lose(self._hub.lines[rank], why, tell=True)

    @property
    def lost(self) -> dict[int, str]:
        """The lost ranks, in the order of their loss, and the reasons."""
        with self.changed:
            return dict(self._hub.lost)

    @property
    def left(self) -> list[int]:
        """The ranks that have left in good order, in the order of their goodbyes."""
        with self.changed:
            return list(self._hub.left)

    @property
    def nbytes(self) -> int:
        """Bytes sent in letters so far."""
        with self.changed:
            return sum(line.nbytes for line in self._hub.lines.values())

    @property
    def seconds(self) -> float:
        """Seconds without suspensions, in steps of a fifth of the lease or less."""
        return self._hub.seconds

    def check(self) -> None:
        """Raise `CommError` where another rank has given this one up."""
        if self._hub.refused:
            raise CommError(
                "the other replicas have gone on without this one",
                why=self._hub.refused,
                fix="if this process is stopped now and then, set TUTTI_LEASE to more seconds",
            )


def _why(error: BaseException) -> str:
    """One text for the different errors of the kernel when the other end has died."""
    return _CLOSED if isinstance(error, ConnectionError) else str(error)
