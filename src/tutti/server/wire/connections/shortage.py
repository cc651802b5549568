"""Distinguishes a lack of resources (descriptors, memory, disk space) from a lost connection."""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path

from tutti.errors import ServerError

# The errors when the other end, or the network, ends a connection.
_OF_PEER = frozenset(
    (
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EPIPE,
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENONET,
        errno.EPROTO,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
    )
)
_LACKING = {
    errno.ENFILE: "the host has no file descriptors left (fs.file-max)",
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota of this user is used up",
    errno.EFBIG: "a file would exceed the largest that the process may write (ulimit -f)",
    errno.EROFS: "the disk takes no writes (it is read-only)",
    errno.EIO: "the disk has failed (input/output error)",
    errno.ENOMEM: "no memory is left",
    errno.ENOBUFS: "no memory is left for sockets",
    errno.EADDRNOTAVAIL: "no local port is left",
}


class ShortError(ServerError):
    """A server, or this process, lacks a resource that it needs."""


def of_peer(error: OSError) -> bool:
    """Whether the other end or the network, not this process, caused a socket error."""
    if isinstance(error, socket.gaierror):
        return error.errno != socket.EAI_SYSTEM
    return isinstance(error, (ConnectionError, TimeoutError)) or error.errno in _OF_PEER


def lack(error: OSError) -> str:
    """The resource that this process lacks, from `error`."""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"all {limit:,} file descriptors of the process are in use (ulimit -n)"
    return _LACKING.get(error.errno or 0) or (error.strerror or str(error))


def num_descriptors() -> int:
    """The number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def records_short(directory: Path, error: OSError) -> ShortError:
    """The error of a server that cannot keep its records in `directory`."""
    return ShortError(
        f"the records of this server cannot be kept: {lack(error)}",
        at=error.filename or str(directory),
        why=f"{error.strerror or error}; a change that is not written down would be lost",
        fix="make room, then start the server again: it goes on from its records",
    )
