"""Random and mutated frames against a live server: it neither crashes, nor grows, nor applies anything."""

from __future__ import annotations

import json
import random
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from server.protocol.updaters import LR, ClippedAdam, cut, gradient
from server.wire.running import SECRET, client, like, services
from tutti.comm.collectives.payload import DTYPES, octets
from tutti.comm.posts.handshake import Connector
from tutti.server.protocol import messages as m
from tutti.server.protocol.keys import VariableBlock
from tutti.server.protocol.messages import TensorPart
from tutti.server.wire.connections import inbox
from tutti.server.wire.connections.address import parsed
from tutti.server.wire.connections.connection import GREETING
from tutti.server.wire.connections.inbox import Inbox, Limits, written
from tutti.server.wire.frames.codec import KINDS, MalformedError, decode, encode
from tutti.server.wire.frames.frames import (
    HEADER_NBYTES,
    PART,
    Header,
    Seal,
    checksum,
    pack,
    part_header,
    unpack,
)
from tutti.server.wire.service import Service

NUM_FRAMES = 100_000
MOST_GROWTH = 32e6


@dataclass
class Frame:
    """A header that is still to be sealed, and what follows it."""

    header: Header
    payload: bytes
    raw: bytes = b""  # instead of a header


def frames(message: Any) -> list[Frame]:
    kind, text, parts = encode(message)
    found = [Frame(Header(kind, 7, len(parts), len(text)), text)]
    for key, part in parts.items():
        payload = b"".join(bytes(octets(x)) for x in (part.rows, part.values) if x is not None)
        found.append(Frame(part_header(7, key, part, 0), payload))
    return found


def sealed(found: list[Frame], seal: Seal) -> bytes:
    out = b""
    for frame in found:
        check = frame.header.check or checksum(memoryview(frame.payload))
        raw = frame.raw or pack(replace(frame.header, check=check), seal)
        out += raw + frame.payload
    return out


def sound(updater: ClippedAdam) -> list[Any]:
    """A request of each kind, of a worker that has joined, as a worker could make it but for its life."""
    who = {"worker": 0, "incarnation": 1}
    values = torch.randn(8, dtype=torch.float64)
    rows = TensorPart(torch.randn(2, 2, dtype=torch.float64), rows=torch.tensor([0, 2]))
    return [
        m.Join(worker=0, incarnation=1, fingerprint="another"),
        m.Pull(**who, clock=0, keys=(0, 1), rows={5: torch.tensor([0])}),
        m.Push(
            **who,
            sequence=1,
            clock=0,
            version=0,
            given={"lr": 1.0},
            parts={0: TensorPart(values), 5: rows},
        ),
        m.Load(
            **who,
            sequence=1,
            slot="step",
            parts={0: TensorPart(torch.zeros((), dtype=torch.float64))},
        ),
        m.Sums(**who, clock=0),
        m.Settle(**who, clock=0, sums={"a": values}),
        m.Add(**who, clock=0, name="n", values=values),
        m.Beat(**who),
        m.Leave(**who),
        m.Status(worker=0, incarnation=1),
    ]


NUMBERS = (0, 1, -1, 2, 7, 255, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64, 10**30)
ODD = (
    None,
    True,
    "",
    "x" * 5000,
    [],
    {},
    [[[]]],
    {"a": 1},
    0.5,
    float("nan"),
    float("inf"),
    *NUMBERS,
)


def mutated(found: list[Frame], chance: random.Random) -> list[Frame]:
    """One thing of a message is otherwise."""
    found = [replace(f) for f in found]
    at = chance.randrange(len(found))
    frame = found[at]
    kind = chance.randrange(7)
    if kind <= 2 and frame.header.kind != PART:
        text = json.loads(frame.payload)
        name = chance.choice([*text, "new"])
        text[name] = chance.choice(ODD)
        frame.payload = json.dumps(text).encode()
        frame.header = replace(frame.header, nbytes=len(frame.payload))
    elif kind == 3:
        frame.header = replace(frame.header, **_header_change(chance))
    elif kind == 4:
        raw = bytearray(frame.payload or b"x")
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        frame.payload = bytes(raw)
    elif kind == 5:
        frame.raw = chance.randbytes(HEADER_NBYTES)
    else:
        found = chance.choice([found[:at], found[at:], found[: at + 1] * 2, found[::-1]]) or found
    return found


def _header_change(chance: random.Random) -> dict[str, Any]:
    unsigned = [x for x in NUMBERS if 0 <= x < 2**64]
    return chance.choice(
        [
            {"kind": chance.randrange(256)},
            {"key": chance.choice(unsigned)},
            {"nbytes": chance.choice(unsigned)},
            {"check": chance.choice(unsigned[1:])},
            {"dtype": chance.choice(DTYPES)},
            {"shape": tuple(chance.choice(unsigned) for _ in range(chance.randrange(9)))},
            {"scale": chance.choice([0.0, float("nan"), -1.0])},
            {"num_rows": chance.choice([None, *unsigned])},
        ]
    )


def wrong_push(chance: random.Random, blocks: tuple[VariableBlock, ...]) -> m.Push:
    """A push in good frames that can only be refused."""
    made = {b.key: TensorPart(torch.randn(b.shape, dtype=torch.float64)) for b in blocks}
    plain = {"sequence": 1, "clock": 0, "version": 0, "worker": 0, "incarnation": 1}
    part, key = made[chance.randrange(len(made))], chance.randrange(len(made))
    if chance.random() < 0.5:
        field = chance.choice(list(plain))
        plain[field] = chance.choice([x for x in NUMBERS if abs(x) < 2**63 and x != plain[field]])
        if field == "incarnation" or field == "worker":
            plain["sequence"] = chance.randrange(1, 9)
        elif field == "sequence" and plain[field] < 1:
            plain["worker"] = 5
    elif chance.random() < 0.5:
        del made[next(b.key for b in blocks if not b.variable.rows)]
    else:
        rows = torch.tensor(chance.choice([[-1], [9], [1, 1], [2, 1]]))
        wrong = [
            TensorPart(part.values.float()),
            TensorPart(part.values[..., None]),
            TensorPart(
                torch.zeros(len(rows), *part.values.shape[1:], dtype=torch.float64), rows=rows
            ),
        ]
        made[key] = chance.choice(wrong)
    return m.Push(given={"lr": 1.0}, parts=made, **plain)


def stranger(server: Service) -> tuple[socket.socket, Seal]:
    """A connection through the handshake, by hand."""
    sock = socket.create_connection(parsed(server.address), timeout=20)
    shake = Connector(SECRET.encode(), GREETING)
    sock.sendall(shake.answer(sock.recv(shake.need, socket.MSG_WAITALL)))
    key = shake.check(sock.recv(shake.need_proof, socket.MSG_WAITALL))
    return sock, Seal(key + b"client")


def attack(server: Service, messages: list[list[Frame]]) -> None:
    """Send these, and see the server end the connection."""
    sock, seal = stranger(server)
    with sock:
        sock.settimeout(20)
        try:
            sock.sendall(b"".join(sealed(frames, seal) for frames in messages))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(2**18):
                pass
        except OSError:  # it has, already
            pass


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Count:
    """How many headers servers of this process have looked at."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, raw: bytes | bytearray, seal: Seal) -> Header:
        self.seen += 1
        return unpack(raw, seal)


def test_frames_that_are_wrong_cost_the_connection_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updater, chance, count = ClippedAdam(), random.Random(0), Count()
    monkeypatch.setattr(inbox, "unpack", count)
    base = [frames(x) for x in sound(updater)]
    fatal = [mutated(chance.choice(base), chance) for _ in range(3000)]
    refused = [frames(wrong_push(chance, cut(updater, 1))) for _ in range(500)]
    with (
        services(updater, "step", 2) as running,
        client(updater, "step", [running[0].address], 0) as one,
    ):
        one.join()
        before, records = one.pull_state(), len(running[0].machine.ledger.members)
        grown = 0
        while count.seen < NUM_FRAMES:
            some = [chance.choice(refused) for _ in range(8)]
            attack(running[0], [*some, *chance.sample(fatal, 3)])
            if count.seen > NUM_FRAMES // 5 and not grown:
                grown = resident_nbytes()
        assert resident_nbytes() - grown < MOST_GROWTH
        after = one.pull_state()
        for name, slots in before.items():
            assert all(torch.equal(after[name][slot], x) for slot, x in slots.items())
        ledger = running[0].machine.ledger
        assert ledger.version == 0 and not ledger.pending and len(ledger.members) == records
        deadline = time.monotonic() + 10
        while len(running[0]._peers) > 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(running[0]._peers) <= 2  # the worker's own
        assert one.push(gradient(like(updater) | before_weights(before), 0, 0), {"lr": LR}).taken


def before_weights(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {n: slots["weight"] for n, slots in state.items()}


LIMITS = Limits(frozenset(range(len(KINDS))), 8, 4096, 16384)


@pytest.mark.parametrize("position", range(10))
def test_a_message_survives_the_way(position: int) -> None:
    """In pieces of any size, with tensors of every dtype."""
    message = sound(ClippedAdam())[position]
    key, chance = b"k" * 32, random.Random(position)
    raw = b"".join(bytes(view) for view in written(9, message, Seal(key)))
    reader, found = Inbox(Seal(key), LIMITS), None
    while raw:
        assert found is None
        view = reader.buffer()
        count = min(len(view), len(raw), chance.randrange(1, 40))
        view[:count] = raw[:count]
        raw, found = raw[count:], reader.filled(count)
    assert found is not None and found[0] == 9
    assert repr(found[1]) == repr(message)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [None, 0, 3])
def test_a_part_of_any_dtype(dtype: torch.dtype, num_rows: int | None) -> None:
    rows = None if num_rows is None else torch.arange(num_rows)
    values = torch.randn(3 if rows is None else len(rows), 5).to(dtype)
    part = TensorPart(values, 0.5, rows)
    raw = b"".join(bytes(octets(x)) for x in (rows, values) if x is not None)
    header = replace(part_header(1, 2, part, 0), check=checksum(memoryview(raw)))
    assert unpack(pack(header, Seal(b"k")), Seal(b"k")) == header
    push = m.Push(
        worker=0, incarnation=1, sequence=1, clock=0, version=0, given={}, parts={2: part}
    )
    reader, found = Inbox(Seal(b"k"), LIMITS), None
    for piece in written(1, push, Seal(b"k")):
        while len(piece):
            view = reader.buffer()
            count = min(len(view), len(piece))
            view[:count] = piece[:count]
            found, piece = reader.filled(count), piece[count:]
    assert found is not None
    back = found[1].parts[2]
    assert torch.equal(back.values, values) and back.scale == 0.5
    assert (back.rows is None) == (rows is None)


def test_frames_cannot_be_moved_repeated_or_left_out() -> None:
    first, second = (pack(Header(7, n, 0, 0), seal) for seal in [Seal(b"k")] for n in (1, 2))
    reader = Seal(b"k")
    assert unpack(first, reader).number == 1
    for wrong in (first, second[:-1] + bytes([second[-1] ^ 1])):
        with pytest.raises(MalformedError, match="wrong tag"):
            unpack(wrong, Seal(b"k") if wrong is not first else reader)
    with pytest.raises(MalformedError, match="wrong tag"):
        unpack(second, Seal(b"k"))
    with pytest.raises(MalformedError, match="wrong tag"):
        unpack(first, Seal(b"another"))


def test_any_flipped_bit_of_a_payload_is_found() -> None:
    raw = bytearray(random.Random(1).randbytes(20_000))
    good = checksum(memoryview(raw))
    for position in range(0, len(raw), 37):
        raw[position] ^= 1 << position % 8
        assert checksum(memoryview(raw)) != good
        raw[position] ^= 1 << position % 8
    assert checksum(memoryview(raw[:-1])) != good
    assert checksum(memoryview(raw + b"\0")) != good


def test_text_of_another_shape_is_no_message() -> None:
    kind, text, _ = encode(m.Beat(worker=1, incarnation=2))
    assert decode(kind, text, {}).worker == 1
    for wrong in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000, text + b" x", text[:-1] + b',"a":1}'):
        with pytest.raises(MalformedError):
            decode(kind, wrong, {})
    with pytest.raises(MalformedError):
        decode(kind, text, {0: TensorPart(torch.zeros(1))})
    with pytest.raises(MalformedError):
        decode(len(KINDS), text, {})
