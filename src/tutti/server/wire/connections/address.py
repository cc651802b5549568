"""Addresses as text, `host:port`, and sockets that listen or connect there."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time

from tutti.errors import ServerError

_BACKLOG = 128
_POLL_SECONDS = 0.05


def parsed(address: str) -> tuple[str, int]:
    """Host and port; an IPv6 address stands in brackets.

    Raises:
        ServerError: the text is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ServerError(f'"{address}" is no address', fix="host:port, such as 127.0.0.1:29600")
    return host.strip("[]"), int(port)


def listener(address: str, *, patience: float = 0.0) -> socket.socket:
    """A socket that listens at `address` and does not block.

    Args:
        address: "host:port".
        patience: seconds to wait for an address that is in use.

    Raises:
        ServerError: it cannot be used.
    """
    host, port = parsed(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = _server((host, port), family, patience)
    except OSError as error:
        raise ServerError(
            f"cannot listen at {address}",
            why=str(error),
            fix="an address of this host, a free port",
        ) from error
    sock.setblocking(False)
    return sock


def _server(
    address: tuple[str, int], family: socket.AddressFamily, patience: float
) -> socket.socket:
    until = time.monotonic() + patience
    while True:
        try:
            return socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
        time.sleep(_POLL_SECONDS)


def connected(address: str, *, seconds: float = 5.0) -> socket.socket:
    """A socket connected to `address`, which notices when the other host is gone.

    Raises:
        OSError: nothing answers.
    """
    sock = socket.create_connection(parsed(address), timeout=seconds)
    watch(sock)
    return sock


def watch(sock: socket.socket) -> None:
    """Let the kernel end a connection whose other host has been silent for about 10 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 4),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 10_000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def within_host(sock: socket.socket) -> bool:
    """Whether both ends are on the loopback interface."""
    try:
        host = sock.getpeername()[0]
    except OSError:
        return False
    return ipaddress.ip_address(host).is_loopback
