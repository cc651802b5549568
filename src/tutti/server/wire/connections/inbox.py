"""Assembles the received bytes of a connection into messages.

It allocates memory for a payload only after it has verified the header and its limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.comm.collectives.payload import octets
from tutti.server.protocol.messages import TensorPart
from tutti.server.wire.connections.region import Half
from tutti.server.wire.frames.codec import TEXT_NBYTES, MalformedError, decode, encode
from tutti.server.wire.frames.frames import (
    HEADER_NBYTES,
    PART,
    SHARED_PART,
    Checksum,
    Header,
    Seal,
    check_part,
    checksum,
    pack,
    part_header,
    read_part,
    unpack,
)

# Memory for a part, from the headers of its message and of itself.
Place = Callable[[Header, Header], Tensor]
# Called with each received part (uint8, 1-D) and its checksum, if one was taken.
Noted = Callable[[Tensor, int], None]


@dataclass(frozen=True)
class Limits:
    """Limits of the input.

    kinds: of messages.  num_parts: of one message.  part_nbytes, parts_nbytes: of one part, of all of one.
    """

    kinds: frozenset[int]
    num_parts: int
    part_nbytes: int
    parts_nbytes: int


def anywhere(message: Header, part: Header) -> Tensor:
    """New memory for each part."""
    return torch.empty(part.nbytes, dtype=torch.uint8)


class Inbox:
    """Fill `buffer()` and call `filled(n)`, which returns each message when it is complete."""

    def __init__(self, seal: Seal, limits: Limits, place: Place = anywhere) -> None:
        self._seal, self._limits, self._place = seal, limits, place
        self.noted: Noted | None = None
        self._header = bytearray(HEADER_NBYTES)
        self.shared: Half | None = None
        self._begin()

    def _begin(self) -> None:
        self._message: Header | None = None
        self._text = bytearray()
        self._parts: dict[int, TensorPart] = {}
        self._parts_nbytes = 0
        self._expect(memoryview(self._header), self._read_message_header)

    def _expect(
        self, view: memoryview, then: Callable[[], Any], *, check: int = 0, noted: bool = False
    ) -> None:
        """`check`: the expected checksum; 0 if the sender took none. `noted`: compute it in any case."""
        self._view, self._then, self._whole, self._check = view, then, view, check
        self._sum, self._summed, self._sums = Checksum(), 0, bool(check) or noted

    def buffer(self) -> memoryview:
        """The memory for the next bytes; never empty."""
        return self._view

    def filled(self, count: int) -> tuple[int, Any] | None:
        """Take `count` received bytes: a message, with the number of its request, if they complete one.

        Raises:
            MalformedError: the input is invalid.
        """
        self._view = self._view[count:]
        if self._sums:  # while they are in the processor's cache
            come = self._whole[self._summed : len(self._whole) - len(self._view)]
            self._summed += self._sum.add(come)
        found = None
        while not len(self._view) and found is None:
            found = self._then()
        return found

    def _read_message_header(self) -> tuple[int, Any] | None:
        header = unpack(self._header, self._seal)
        plain = header.num_rows is None and not header.shape
        if header.kind not in self._limits.kinds or not plain:
            raise MalformedError(f"a message of kind {header.kind}")
        if header.nbytes > TEXT_NBYTES or header.key > self._limits.num_parts:
            raise MalformedError("a message that is too long")
        self._message = header
        self._text = bytearray(header.nbytes)
        self._expect(memoryview(self._text), self._read_text, check=header.check)
        return None

    def _read_text(self) -> tuple[int, Any] | None:
        assert self._message is not None
        self._verify()
        return self._next_part()

    def _next_part(self) -> tuple[int, Any] | None:
        assert self._message is not None
        if len(self._parts) < self._message.key:
            self._expect(memoryview(self._header), self._read_part_header)
            return None
        message = decode(self._message.kind, self._text, self._parts)
        number = self._message.number
        self._begin()
        return number, message

    def _read_part_header(self) -> tuple[int, Any] | None:
        assert self._message is not None
        header = unpack(self._header, self._seal)
        shared = self.shared if header.kind == SHARED_PART else None
        if (header.kind != PART and not shared) or header.number != self._message.number:
            raise MalformedError("a frame other than the next part")
        check_part(header, self._limits.part_nbytes)
        self._parts_nbytes += header.nbytes
        if header.key in self._parts or self._parts_nbytes > self._limits.parts_nbytes:
            raise MalformedError("a part that comes twice, or parts above the limit in all")
        self._part = header
        self._body = self._place(self._message, header)
        if shared:
            check = shared.take(header.check, self._body, summed=self.noted is not None)
            self._note(check)
            self._parts[header.key] = read_part(header, self._body)
            return self._next_part()
        noted = self.noted is not None
        self._expect(octets(self._body), self._read_body, check=header.check, noted=noted)
        return None

    def _read_body(self) -> tuple[int, Any] | None:
        self._note(self._verify())
        self._parts[self._part.key] = read_part(self._part, self._body)
        return self._next_part()

    def _note(self, check: int) -> None:
        if self.noted is not None and check:
            self.noted(self._body, check)

    def _verify(self) -> int:
        """The checksum of the received bytes, if one was taken; else 0."""
        if not self._sums:
            return 0
        found = self._sum.value(self._whole[self._summed :], len(self._whole))
        if self._check not in (0, found):
            raise MalformedError("a payload with a wrong checksum")
        return found


def written(
    number: int, message: Any, seal: Seal, *, checked: bool = True, shared: Half | None = None
) -> Iterator[memoryview]:
    """A message as buffers to send, one after the other; those of parts are views of their tensors.

    It makes each on demand: while the kernel sends one part, it takes the checksum of the next (if
    `checked`). Large parts go into `shared` memory, if there is some.
    """
    check = checksum if checked else _unchecked
    kind, text, parts = encode(message)
    payload = memoryview(text)
    yield memoryview(pack(Header(kind, number, len(parts), len(text), check(payload)), seal))
    yield payload
    if shared:
        shared.begin()
    for key, part in parts.items():
        pieces = [x for x in (part.rows, part.values) if x is not None]
        begin = shared.put(pieces) if shared else None
        if begin is not None:
            yield memoryview(pack(part_header(number, key, part, begin, SHARED_PART), seal))
            continue
        bodies = [octets(x) for x in pieces]
        whole = bodies[0] if len(bodies) == 1 else memoryview(b"".join(bodies))
        yield memoryview(pack(part_header(number, key, part, check(whole)), seal))
        if len(whole):
            yield whole


def _unchecked(payload: memoryview) -> int:
    return 0
