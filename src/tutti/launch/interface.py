"""Why Gloo finds no address on the interface by which ranks are to reach each other, and what helps."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys

_NO_ADDRESS = "Unable to find address for"
_SIOCGIFFLAGS, _IFF_UP, _IFF_LOOPBACK = 0x8913, 0x1, 0x8  # netdevice(7)


def without_address(message: str) -> tuple[str, str] | None:
    """What is wrong with the interface, and a fix; None if a message of Gloo is about something else."""
    if _NO_ADDRESS not in message:
        return None
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    flags = _flags(name)
    if flags is None:
        others = ", ".join(other for _, other in socket.if_nameindex())
        return f"there is no network interface {name}", f"GLOO_SOCKET_IFNAME, with one of {others}"
    loopback = "loopback" if flags & _IFF_LOOPBACK else "network"
    if not flags & _IFF_UP:
        return f"the {loopback} interface {name} is down", f"ip link set {name} up"
    address = "127.0.0.1/8" if flags & _IFF_LOOPBACK else "ADDRESS"
    return (
        f"the {loopback} interface {name} has no address",
        f"ip address add {address} dev {name}",
    )


def _flags(name: str) -> int | None:
    """The flags of an interface; None if there is none of that name."""
    if sys.platform != "linux":
        return _IFF_UP
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
        except OSError as error:
            return None if error.errno == errno.ENODEV else _IFF_UP
    return int(struct.unpack_from("H", answer, 16)[0])
