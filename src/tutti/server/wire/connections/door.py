"""Accepts connections up to a limit and refuses the rest with a reason.

A server without a free descriptor cannot even refuse. So it keeps a spare one: it accepts a connection above
the limit with it, completes the handshake, and refuses the first request with the reason. It holds one such
connection at a time; others wait in the kernel's queue.
"""

from __future__ import annotations

import logging
import os
import resource
import selectors
import socket
from collections.abc import Callable
from typing import NamedTuple

from tutti.server.wire.connections.address import listener, watch
from tutti.server.wire.connections.shortage import ShortError, lack, num_descriptors, of_peer

MOST_CONNECTIONS = 512
_LEAST_CONNECTIONS = 4
_RESERVE = 24  # descriptors for segments, journals and snapshots
_LOG = logging.getLogger("tutti.server")


class Arrival(NamedTuple):
    """A connection; `short` is the resource that the server lacks for it, "" if none."""

    sock: socket.socket
    name: str
    short: str


class Door:
    """The listening socket.

    Args:
        address: "host:port"; port 0 takes a free one.
        selector: waits for connections while the door is open.
        action: the selector's loop calls it for a connection.
        patience: seconds to wait for an address that is in use.

    Raises:
        ServerError: the address is unusable, or too few descriptors are free to serve a connection.
    """

    def __init__(
        self,
        address: str,
        selector: selectors.BaseSelector,
        action: Callable[[], None],
        *,
        patience: float = 0.0,
    ) -> None:
        self.most = _most_connections()
        self._selector, self._action = selector, action
        self._listener = listener(address, patience=patience)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._spare: int | None = None
        self._is_open = False
        self.open()

    def accept(self, num_connections: int) -> Arrival | None:
        """The next connection, beside `num_connections` others; None if there is none after all."""
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            if isinstance(error, (BlockingIOError, InterruptedError)) or of_peer(error):
                return None
            return self._accept_with_spare(lack(error))
        short = ""
        if num_connections >= self.most:
            short = f"{num_connections} connections are open, the most that this server takes"
        return self._arrival(sock, address, short)

    def open(self) -> None:
        """Wait for connections, if a spare descriptor is available."""
        if self._is_open:
            return
        try:
            if self._spare is None:
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # it is tried again
        self._selector.register(self._listener, selectors.EVENT_READ, self._action)
        self._is_open = True

    def shut(self) -> None:
        """Let connections wait in the kernel's queue."""
        if self._is_open:
            self._selector.unregister(self._listener)
            self._is_open = False

    def close(self) -> None:
        """Stop listening."""
        self.shut()
        self._listener.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _accept_with_spare(self, short: str) -> Arrival | None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        self.shut()
        try:
            return self._arrival(*self._listener.accept(), short)
        except OSError:
            _LOG.error("cannot take a connection: %s", short)
            return None

    def _arrival(self, sock: socket.socket, address: tuple[object, ...], short: str) -> Arrival:
        name = "{}:{}".format(*address[:2])
        watch(sock)
        if short:
            _LOG.error("refused %s: %s", name, short)
        return Arrival(sock, name, short)


def _most_connections() -> int:
    """Each may need two descriptors: for its socket, and for its shared memory."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    most = min(MOST_CONNECTIONS, (limit - num_descriptors() - _RESERVE) // 2)
    if most < _LEAST_CONNECTIONS:
        raise ShortError(
            f"too few file descriptors for a server: {num_descriptors()} of {limit:,} are open",
            why=f"it keeps {_RESERVE} for its records, and each connection may need two",
            fix="ulimit -n 4096",
        )
    return most
