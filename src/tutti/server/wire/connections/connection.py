"""One end of a connection: a nonblocking socket, with an input and an output queue."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tutti.comm.posts.handshake import Acceptor, Connector
from tutti.server.wire.connections.address import within_host
from tutti.server.wire.connections.inbox import Inbox, Limits, Noted, Place, anywhere, written
from tutti.server.wire.connections.region import Half
from tutti.server.wire.frames.frames import Seal

# The protocol; its last byte is the version.
GREETING = b"tuti\x02"
# Bytes that one connection may read or write before others have a turn.
_TURN_NBYTES = 8 * 2**20
_PIECE_NBYTES = 2**22
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_WORTH_NBYTES = 2**20
_RECORD_NBYTES = 2**15  # more than one of TLS
_MOST_BUFFERS = 16
_SMALL_NBYTES = 2**17


class ClosedError(ConnectionError):
    """The other end has closed the connection."""


class Connection:
    """Messages over one socket, once both ends have proved that they know the secret.

    Args:
        sock: connected; nonblocking from now on. With TLS it is wrapped already, its handshake not done.
        secret: the common secret.
        server_side: whether this is the server's end of the handshake.
        limits, place: of the input (`inbox.Inbox`).  `noted`, too, if it is set before the first input.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        limits: Limits,
        *,
        server_side: bool,
        place: Place = anywhere,
    ) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.place = sock, place
        self.noted: Noted | None = None
        self.opened = False
        self._limits = limits
        self._tls = isinstance(sock, ssl.SSLSocket)
        self.within_host = not self._tls and within_host(sock)
        self._checked = not self._tls and not self.within_host
        self._shared: Half | None = None
        self._least = 1
        self._greeted = not self._tls
        self._wants_write = False
        self._outbox: deque[tuple[Iterator[memoryview], Callable[[], None] | None]] = deque()
        self._now: list[memoryview] = []
        self._done: Callable[[], None] | None = None
        self._handshake = (Acceptor if server_side else Connector)(secret, GREETING)
        self._raw = bytearray(self._handshake.need)
        self._view = memoryview(self._raw)
        self._inbox: Inbox | None = None
        self._seal: Seal | None = None
        if isinstance(self._handshake, Acceptor):
            self._put(self._handshake.hello)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    @property
    def events(self) -> int:
        """The selector events to wait for."""
        if not self._greeted:
            return selectors.EVENT_WRITE if self._wants_write else selectors.EVENT_READ
        writing = selectors.EVENT_WRITE if self._now or self._outbox else 0
        return selectors.EVENT_READ | writing

    @property
    def more(self) -> bool:
        """Whether there is input that no selector sees."""
        return isinstance(self.sock, ssl.SSLSocket) and self._greeted and self.sock.pending() > 0

    def send(self, number: int, message: Any, *, done: Callable[[], None] | None = None) -> None:
        """Queue a message; calls `done` when it has left, or never can."""
        assert self._seal is not None
        buffers = written(number, message, self._seal, checked=self._checked, shared=self._shared)
        self._outbox.append((buffers, done))

    def share(self, *, incoming: Half | None = None, outgoing: Half | None = None) -> None:
        """From the next message on, put large parts into shared memory."""
        assert self._inbox is not None
        self._inbox.shared = incoming or self._inbox.shared
        self._shared = outgoing or self._shared

    def read(self) -> tuple[int, Any] | None:
        """The next message, if it is complete, and the number of its request; does not wait.

        Raises:
            OSError: the connection is lost.
            MalformedError, RefusedError: the input is invalid.
        """
        left = _TURN_NBYTES if self._greet() else 0
        message = None
        while left > 0 and message is None:
            try:
                count = self._receive(self._room()[:_PIECE_NBYTES])
            except _NOT_NOW:
                break
            if not count:
                raise ClosedError("closed by the other end")
            left -= count
            message = self._filled(count)
        self._wait_for(len(self._room()))
        return message

    def _receive(self, view: memoryview) -> int:
        """Receive the available bytes; of TLS, which gives a record at a time, several records."""
        count = self.sock.recv_into(view)
        if self._tls and count:
            with contextlib.suppress(*_NOT_NOW):
                while count < len(view) and (more := self.sock.recv_into(view[count:])):
                    count += more
        return count

    def _room(self) -> memoryview:
        return self._inbox.buffer() if self._inbox else self._view

    def _wait_for(self, nbytes: int) -> None:
        """Wake only when that many bytes, or enough, are available: a wake-up costs more than a copy."""
        # of TLS a record's part may have been taken already
        least = max(1, min(nbytes - _RECORD_NBYTES * self._tls, _WORTH_NBYTES))
        if least != self._least:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    def write(self) -> None:
        """Send as much as possible without waiting.

        Raises:
            OSError: the connection is lost.
        """
        if not self._greet():
            return
        left = _TURN_NBYTES
        while left > 0 and (self._now or self._fill()):
            try:
                count = self._send_now()
            except _NOT_NOW:
                return
            left -= count
            self._sent(count)

    def close(self) -> None:
        """Close the connection and drop the output queue."""
        self.sock.close()
        for done in (self._done, *(done for _, done in self._outbox)):
            if done:
                done()
        self._outbox.clear()
        self._now, self._done = [], None

    def _greet(self) -> bool:
        """Continue the handshake of TLS; whether it is done."""
        if isinstance(self.sock, ssl.SSLSocket) and not self._greeted:
            try:
                self.sock.do_handshake()
            except ssl.SSLWantReadError:
                self._wants_write = False
                return False
            except ssl.SSLWantWriteError:
                self._wants_write = True
                return False
            self._greeted = True
        return True

    def _filled(self, count: int) -> tuple[int, Any] | None:
        if self._inbox:
            return self._inbox.filled(count)
        self._view = self._view[count:]
        if not len(self._view):
            self._introduce(bytes(self._raw))
        return None

    def _introduce(self, raw: bytes) -> None:
        """The next step of the handshake."""
        shake = self._handshake
        if isinstance(shake, Acceptor):
            answer, key = shake.receive(raw)
            self._put(answer)
            self._open(key, b"client", b"server")
        elif len(raw) == shake.need:
            self._put(shake.answer(raw))
            self._raw = bytearray(shake.need_proof)
            self._view = memoryview(self._raw)
        else:
            self._open(shake.check(raw), b"server", b"client")

    def _open(self, key: bytes, incoming: bytes, outgoing: bytes) -> None:
        self._inbox = Inbox(Seal(key + incoming), self._limits, lambda m, p: self.place(m, p))
        self._inbox.noted = self.noted
        self._seal = Seal(key + outgoing)
        self.opened = True

    def _put(self, raw: bytes) -> None:
        self._outbox.append((iter([memoryview(raw)]), None))

    def _fill(self) -> bool:
        """Take the next output buffers; whether there are any."""
        while self._outbox:
            buffers, done = self._outbox[0]
            for view in buffers:
                self._now.append(view)
                if len(view) > _SMALL_NBYTES or len(self._now) == _MOST_BUFFERS:
                    return True
            self._outbox.popleft()
            if self._now:
                # `done` is due when the last of these has gone.
                self._done = done
                return True
            if done:
                done()
        return bool(self._now)

    def _send_now(self) -> int:
        if self._tls:
            view, sock = self._now[0], self.sock
            count = sock.send(view)
            with contextlib.suppress(*_NOT_NOW):
                while count < len(view):
                    count += sock.send(view[count : count + _RECORD_NBYTES])
            return count
        return self.sock.sendmsg(self._now)

    def _sent(self, count: int) -> None:
        while self._now and count >= len(self._now[0]):
            count -= len(self._now.pop(0))
        if count:
            self._now[0] = self._now[0][count:]
        if not self._now and self._done:
            done, self._done = self._done, None
            done()
