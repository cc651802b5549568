"""Sockets between the ranks of a run; all ranks make them together.

The later rank in the order connects to the earlier one, and both prove that they know the run's secret
(`handshake.py`). Once all are connected, no socket listens any more.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.group import Group
from tutti.comm.collectives.groups import Groups
from tutti.comm.posts.handshake import Acceptor, Connector, RefusedError
from tutti.environment import SECRET
from tutti.errors import CommError

_GREETING = b"tutti post 2"
_RANK = struct.Struct("!I")
_HANDSHAKE_SECONDS = 10.0
_SIOCGIFADDR = 0x8915


def connect_lines(
    earlier: Sequence[int], later: Sequence[int], groups: Groups
) -> dict[int, socket.socket]:
    """An open socket to each of these ranks; all ranks of the run call this together.

    Args:
        earlier: the ranks that this one connects to; each has it among its `later`.
        later: the ranks that connect to this one.
        groups: of the run.

    Raises:
        CommError: a rank does not connect in time, or does not know the secret.
    """
    near = [rank for rank in later if groups.same_host(rank, groups.rank)]
    listening = {True: _listen(near=True), False: None}
    if len(near) < len(later):
        listening[False] = _listen(near=False)
    mine = {
        "token": secrets.token_hex(16),
        "near": _name(listening[True]),
        "far": _name(listening[False]),
    }
    said = [json.loads(text) for text in exchange_texts(json.dumps(mine), Group.world())]
    secret = _secret([one["token"] for one in said])
    deadline = time.monotonic() + groups.timeout.total_seconds()
    found: dict[int, socket.socket] = {}
    try:
        for rank in earlier:
            same = groups.same_host(rank, groups.rank)
            found[rank] = _connect(rank, said[rank]["near" if same else "far"], groups.rank, secret)
        for same in (True, False):
            expected = {r for r in later if groups.same_host(r, groups.rank) == same}
            found |= _accept(listening[same], expected, secret, deadline)
    finally:
        for one in filter(None, listening.values()):
            one.close()
    for one in found.values():
        one.settimeout(None)
    return found


def _secret(tokens: list[str]) -> bytes:
    """The run's secret: torch.distributed carries the tokens without encryption."""
    return hashlib.sha256("\0".join([*tokens, SECRET.read()]).encode()).digest()


def _listen(*, near: bool) -> socket.socket:
    if near:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(f"\0tutti-{os.getpid()}-{secrets.token_hex(8)}")  # no file to remove
    else:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.bind((own_address(), 0))
    listening.listen(64)
    return listening


def own_address() -> str:
    """The address of Gloo's configured interface, else of the one towards the rendezvous."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return probe.getsockname()[0]


def _name(listening: socket.socket | None) -> list[object] | str:
    if listening is None:
        return ""
    name = listening.getsockname()
    return name.decode()[1:] if isinstance(name, bytes) else list(name)


def _connect(rank: int, name: str | list[object], me: int, secret: bytes) -> socket.socket:
    near = isinstance(name, str)
    one = socket.socket(socket.AF_UNIX if near else socket.AF_INET, socket.SOCK_STREAM)
    try:
        one.settimeout(_HANDSHAKE_SECONDS * 6)  # it may still wait for others
        one.connect(f"\0{name}" if near else tuple(name))
        _at_once(one)
        _introduce(one, me, secret)
    except (OSError, RefusedError) as error:
        one.close()
        raise CommError(f"cannot connect to rank {rank}", why=str(error)) from error
    return one


def _introduce(one: socket.socket, me: int, secret: bytes) -> None:
    shake = Connector(secret, _GREETING, name=_RANK.pack(me))
    one.sendall(shake.answer(_exactly(one, shake.need)))
    try:
        proof = _exactly(one, shake.need_proof)
    except OSError as error:
        raise RefusedError(f"it does not accept this rank as one of its run: {error}") from error
    shake.check(proof)


def _accept(
    listening: socket.socket | None, expected: set[int], secret: bytes, deadline: float
) -> dict[int, socket.socket]:
    found: dict[int, socket.socket] = {}
    while listening is not None and set(found) != expected:
        listening.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            one, _ = listening.accept()
        except TimeoutError:
            missing = ", ".join(map(str, sorted(expected - set(found))))
            raise CommError(f"ranks {missing} did not connect to the other replicas") from None
        try:
            one.settimeout(_HANDSHAKE_SECONDS)
            found[_greet(one, expected - set(found), secret)] = one
        except (OSError, RefusedError):  # a stranger; the expected rank will still connect
            one.close()
    return found


def _greet(one: socket.socket, expected: set[int], secret: bytes) -> int:
    _at_once(one)
    shake = Acceptor(secret, _GREETING, name_nbytes=_RANK.size)
    one.sendall(shake.hello)
    answer, _ = shake.receive(_exactly(one, shake.need))
    (rank,) = _RANK.unpack(shake.name)
    if rank not in expected:
        raise RefusedError("no rank that is expected")
    one.sendall(answer)
    return rank


def _at_once(one: socket.socket) -> None:
    if one.family == socket.AF_INET:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(one: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = one.recv(size - len(data))
        if not part:
            raise OSError("its connection has closed")
        data += part
    return data
