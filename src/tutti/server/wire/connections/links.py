"""A worker's connections to all servers: it repeats a request over new connections until the answer.

It reconnects a lost connection after 0.05 s, then after twice as long each time, up to a second, and sends
unanswered requests again, with the same number. Servers act once, so that does no harm.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tutti.comm.posts.handshake import RefusedError
from tutti.errors import CommError, ServerError
from tutti.server.protocol.machine import OBSERVER
from tutti.server.protocol.messages import OVER, SHORT, Refused, Reply, Request, Share, Shared
from tutti.server.wire.connections.address import connected
from tutti.server.wire.connections.connection import Connection
from tutti.server.wire.connections.inbox import Limits
from tutti.server.wire.connections.region import accepted, wanted
from tutti.server.wire.connections.run_over import RunOverError, told
from tutti.server.wire.connections.shortage import ShortError, lack, of_peer
from tutti.server.wire.frames.codec import MalformedError
from tutti.server.wire.frames.frames import Header

_LOG = logging.getLogger("tutti.server")
_FIRST_DELAY, _LAST_DELAY = 0.05, 1.0
_MOST_REFUSALS = 4
# How long this process may lack the resources to connect.
_SHORT_SECONDS = 5.0
_SHARING = 0  # the number of requests that belong to the connection

# Memory for the part of a reply, from its key and header; None: new memory.
Room = Callable[[Header], Tensor | None]


class _Link:
    """One server: its address, the connection if there is one, and its open requests."""

    def __init__(self, server: int, address: str) -> None:
        self.server, self.address = server, address
        self.connection: Connection | None = None
        self.request: tuple[int, Request] | None = None
        self.sent = False
        self.delay, self.due = _FIRST_DELAY, 0.0
        self.refusals = 0
        self.lost = ""  # why there is no connection
        self.short_since: float | None = None


class Links:
    """Connections to servers, used by one thread at a time.

    Args:
        addresses: of the servers, in their order.
        secret: the common secret.
        tls: a client's context, or None.
        limits: of the servers' messages.
        patience_seconds: how long an answer may take.
        share: put payloads into memory shared with servers of this host.
        over: the error for a server that has ended for good, or None; asked when it cannot be reached.
    """

    def __init__(
        self,
        addresses: list[str],
        secret: bytes,
        tls: ssl.SSLContext | None,
        limits: Limits,
        patience_seconds: float,
        *,
        share: bool = False,
        over: Callable[[int], RunOverError | None] = lambda server: None,
    ) -> None:
        self._secret, self._tls, self._limits = secret, tls, limits
        self._patience_seconds = patience_seconds
        self._share = share and wanted()
        self._links = [_Link(server, address) for server, address in enumerate(addresses)]
        self._selector = selectors.DefaultSelector()
        self._numbers = itertools.count(1)
        self._room: Room | None = None
        self._number = 0
        self._failure: ServerError | RunOverError | None = None
        self._over = over

    @property
    def failed(self) -> bool:
        """Whether every `ask` raises now."""
        return self._failure is not None

    def fail(self, error: ServerError | RunOverError) -> None:
        """Let every `ask` raise `error`, including a waiting one; any thread may call this."""
        self._failure = error

    def ask(self, requests: Mapping[int, Request], room: Room | None = None) -> dict[int, Reply]:
        """Every server's answer to its request.

        Raises:
            CommError: an answer takes too long.
            RunOverError: a server has ended, or ends, since the run cannot go on.
            ServerError: a server refuses this worker's secret or certificate.
            ShortError: a server, or this process, lacks a resource.
        """
        number = self._number = next(self._numbers)
        self._room = room
        asked = [self._links[server] for server in requests]
        for link in asked:
            link.request, link.sent = (number, requests[link.server]), False
        replies: dict[int, Reply] = {}
        end = time.monotonic() + self._patience_seconds
        while len(replies) < len(asked):
            now = time.monotonic()
            if self._failure is not None:
                raise self._failure
            if now > end:
                raise self._late(asked)
            for link in asked:
                self._advance(link, now)
            self._wait(asked, replies)
        return replies

    def close(self) -> None:
        """Close all connections."""
        for link in self._links:
            self._lose(link, 0.0)
        self._selector.close()

    def _advance(self, link: _Link, now: float) -> None:
        """Make the connections that are due, and send."""
        if link.request is None:
            return
        if link.connection is None and now >= link.due:
            if link.delay > _FIRST_DELAY and (over := self._over(link.server)):
                raise self._end(over)
            self._connect(link, now)
        connection = link.connection
        if connection is not None and connection.opened and not link.sent:
            connection.send(*link.request)
            link.sent = True
            self._try(link, connection.write)

    def _wait(self, asked: list[_Link], replies: dict[int, Reply]) -> None:
        due = [x.due for x in asked if x.connection is None and x.request is not None]
        seconds = max(0.0, min(due) - time.monotonic()) if due else 0.5
        more = [x for x in asked if x.connection is not None and x.connection.more]
        if not self._selector.get_map():
            time.sleep(seconds)
        ready = self._selector.select(0.0 if more else seconds)
        for link in {id(x): x for x in [*more, *(key.data for key, _ in ready)]}.values():
            self._try(link, lambda x=link: self._exchange(x, replies))

    def _exchange(self, link: _Link, replies: dict[int, Reply]) -> None:
        connection = link.connection
        if connection is None:
            return
        strange = not connection.opened
        found = connection.read()
        if connection.opened:
            link.delay, link.refusals = _FIRST_DELAY, 0
        if connection.opened and strange and self._share and connection.within_host:
            connection.send(_SHARING, Share(worker=OBSERVER, incarnation=0))
        connection.write()
        self._selector.modify(connection.sock, connection.events, link)
        if found and found[0] == _SHARING and isinstance(found[1], Shared):
            self._accept(connection, found[1])
        if found and link.request and found[0] == link.request[0]:
            link.request = None
            if isinstance(found[1], Refused) and found[1].reason == SHORT:
                raise ShortError(
                    f"server {link.server} refuses this worker: {found[1].text}",
                    at=link.address,
                    why="the server lacks it, not this worker",
                    fix="the server's output says more",
                )
            if isinstance(found[1], Refused) and found[1].reason == OVER:
                raise self._end(told(found[1].text))
            replies[link.server] = found[1]

    def _accept(self, connection: Connection, shared: Shared) -> None:
        """Map the memory that a server offers, and confirm it."""
        halves = accepted(shared) if shared.nbytes else None
        if halves:
            connection.share(outgoing=halves[0], incoming=halves[1])
            connection.send(_SHARING, Share(worker=OBSERVER, incarnation=0, mapped=1))

    def _try(self, link: _Link, action: Callable[[], Any]) -> None:
        """Run `action`; an error ends the connection."""
        try:
            action()
            if link.connection is not None:
                self._selector.modify(link.connection.sock, link.connection.events, link)
        except RefusedError as error:
            raise ServerError(
                f"server {link.server} cannot be trusted", at=link.address, why=str(error)
            ) from error
        except ssl.SSLError as error:
            if not link.connection or link.connection.opened:
                self._lose(link, time.monotonic())
                return
            raise self._refused(link, f"TLS: {error}") from error
        except (OSError, MalformedError) as error:
            if isinstance(error, OSError) and not of_peer(error):
                self._lack(link, error)
            link.lost = str(error)
            self._lose(link, time.monotonic(), counts=isinstance(error, ConnectionError))

    def _connect(self, link: _Link, now: float) -> None:
        try:
            sock = connected(link.address)
        except OSError as error:
            if not of_peer(error):
                self._lack(link, error)
            link.lost = error.strerror or str(error)
            self._lose(link, now)
            return
        link.lost, link.short_since = "", None
        if self._tls:
            host = link.address.rpartition(":")[0].strip("[]")
            sock.setblocking(False)
            sock = self._tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        link.connection = Connection(sock, self._secret, self._limits, server_side=False)
        link.connection.place = self._place
        link.sent = False
        self._selector.register(sock, link.connection.events, link)
        self._try(link, link.connection.write)

    def _end(self, error: RunOverError) -> RunOverError:
        """Let later requests raise the error, too."""
        self._failure = error
        return error

    def _lack(self, link: _Link, error: OSError) -> None:
        """Handle a lack of resources of this process while it connects, which may be temporary."""
        now = time.monotonic()
        if link.short_since is None:
            link.short_since = now
            _LOG.warning("this worker cannot connect to server %d: %s", link.server, lack(error))
        if now - link.short_since >= _SHORT_SECONDS:
            raise ShortError(
                f"this worker cannot connect to server {link.server}: {lack(error)}",
                at=link.address,
                why=f"{error.strerror or error}, in this process, for {_SHORT_SECONDS:g} s",
                fix="more of it for this process; the server has not been asked",
            ) from error

    def _lose(self, link: _Link, now: float, *, counts: bool = False) -> None:
        """Drop a lost connection, and schedule another one."""
        if link.connection is not None:
            if counts and not link.connection.opened:
                link.refusals += 1  # it was closed in the handshake
            self._selector.unregister(link.connection.sock)
            link.connection.close()
        link.connection, link.sent = None, False
        link.due = now + link.delay
        link.delay = min(2 * link.delay, _LAST_DELAY)
        if counts and link.refusals >= _MOST_REFUSALS:
            raise self._refused(link, "it ends the handshake")

    def _place(self, message: Header, part: Header) -> Tensor:
        wanted = self._room is not None and message.number == self._number
        found = self._room(part) if self._room and wanted else None
        return torch.empty(part.nbytes, dtype=torch.uint8) if found is None else found

    def _refused(self, link: _Link, why: str) -> ServerError:
        return ServerError(
            f"server {link.server} refuses this worker",
            at=link.address,
            why=why,
            fix="the servers' secret, and certificates that are valid, where they ask for them",
        )

    def _late(self, asked: list[_Link]) -> CommError:
        late = [link for link in asked if link.request is not None]
        where = ", ".join(f"server {x.server} ({x.address})" for x in late)
        gone = all(x.connection is None for x in late)
        lost = ", ".join(sorted({x.lost for x in late} - {""}))
        kind = type(late[0].request[1]).__name__.lower() if late[0].request else ""
        return CommError(
            f"no answer from {where} for {self._patience_seconds:g} s",
            at=f"{kind} of this worker",
            why=f"it cannot be reached{f' ({lost})' if lost else ''}"
            if gone
            else "it waits for other workers, or is stopped",
            fix="look at the servers' output; TUTTI_TIMEOUT is how long to wait",
        )
