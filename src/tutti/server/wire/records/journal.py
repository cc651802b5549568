"""Entries in a file, one after the other: records in a journal, the ledger in a snapshot.

    offset  field     type
    0       magic     4 bytes  b"tutE"
    4       number    u32      of the file: 7 in journal-7
    8       position  u64      0, 1, ... in the file
    16      nbytes    2 x u64  of the text, of the bytes
    32      check     u64      of the text and of the bytes
    40      tag       8 bytes  hash of the 40 bytes before
    48      the text (JSON), the bytes

A process killed during a write leaves a torn tail: the beginning of its last entry. The server has not
answered that record, so a reader omits it. Anything else is damage: a wrong tag or checksum, another number
or position.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from tutti.comm.collectives.payload import DTYPES, octets
from tutti.errors import ServerError
from tutti.server.protocol.messages import TensorPart
from tutti.server.wire.frames.codec import MalformedError, decode, encode
from tutti.server.wire.frames.frames import checksum
from tutti.server.wire.records.private import open_private
from tutti.server.wire.records.push_segments import Segments, Slab

MAGIC = b"tutE"
_FIELDS = struct.Struct("<4sIQQQQ")
_TAG_NBYTES = 8
HEAD_NBYTES = _FIELDS.size + _TAG_NBYTES
_MOST_BUFFERS = 512
# The last entry of a journal with a successor.
NEXT = "next"
_BEHIND = "acknowledged pushes may lie behind it"
_REPAIR = "go on without this entry and all after it: tutti serve --repair"


class DamageError(ServerError):
    """A damaged file of records, and the offset of its first bad entry."""

    def __init__(self, path: Path, offset: int, why: str, position: int = 0) -> None:
        self.path, self.offset, self.position = path, offset, position
        whole = path.name.startswith("snapshot")
        super().__init__(
            f"the records of this server are damaged at byte {offset} of {path.name}",
            at=str(path),
            why=f"{why}; {'nothing can be made without it' if whole else _BEHIND}",
            fix="bring the file back; or "
            + ("begin anew from a checkpoint, with an empty directory" if whole else _REPAIR),
        )


@dataclass(frozen=True)
class Head:
    """The header of an entry."""

    number: int
    position: int
    text_nbytes: int
    body_nbytes: int
    check: int

    @property
    def nbytes(self) -> int:
        """Of the whole entry."""
        return HEAD_NBYTES + self.text_nbytes + self.body_nbytes

    def pack(self) -> bytes:
        """Its bytes."""
        own = (self.number, self.position, self.text_nbytes, self.body_nbytes, self.check)
        raw = _FIELDS.pack(MAGIC, *own)
        return raw + _tag(raw)

    @classmethod
    def unpack(cls, raw: bytes) -> Head | None:
        """Read a head; None if these bytes are none."""
        magic, *own = _FIELDS.unpack(raw[: _FIELDS.size])
        if magic != MAGIC or raw[_FIELDS.size :] != _tag(raw[: _FIELDS.size]):
            return None
        return cls(*own)


class Entries:
    """Writes a new file of entries; only its owner may read it.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, number: int, *, fsync: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._fd = open_private(path, flags)
        self._number, self._fsync = number, fsync
        self.count = self._nbytes = 0

    def write(self, text: dict[str, Any], body: list[memoryview]) -> None:
        """Append an entry; with `fsync` it is on the disk when this returns.

        Raises:
            OSError: there is no room; the file is then truncated to its whole entries.
        """
        raw = json.dumps(text, separators=(",", ":")).encode()
        if len(body) > 1:
            body = [memoryview(b"".join(body))]
        check = checksum(memoryview(raw)) ^ checksum(body[0] if body else memoryview(b""))
        head = Head(self._number, self.count, len(raw), sum(map(len, body)), check)
        try:
            self._put([memoryview(head.pack() + raw), *body])
            if self._fsync:
                os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._nbytes)
            raise
        self.count += 1
        self._nbytes += head.nbytes

    def sync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _put(self, pieces: list[memoryview]) -> None:
        for piece in pieces:
            while len(piece):
                piece = piece[os.write(self._fd, piece) :]


class Journal:
    """Writes records to a file."""

    def __init__(self, path: Path, number: int, *, fsync: bool) -> None:
        self._entries, self._fsync = Entries(path, number, fsync=fsync), fsync

    @property
    def num_records(self) -> int:
        """The number of records."""
        return self._entries.count

    def write(self, record: Any, segments: Segments) -> set[int]:
        """Append a record; returns the slabs that it names."""
        text, body, named = entry(record, segments)
        if self._fsync:
            for slab in named.values():
                # the slab's bytes must be on the disk before the record that names them
                segments.flush(slab)
        self._entries.write(text, body)
        return set(named)

    def end(self, following: int) -> None:
        """Write the last entry: records continue in the journal with the number `following`."""
        self._entries.write({NEXT: following}, [])

    def close(self) -> None:
        """Close the file."""
        self._entries.close()


def entry(
    record: Any, segments: Segments
) -> tuple[dict[str, Any], list[memoryview], dict[int, Slab]]:
    """A record as text and bytes; it names tensors in a slab with a checksum, and does not copy them."""
    kind, text, parts = encode(record)
    places, body, named, offset = [], [], dict[int, Slab](), 0
    for key, part in parts.items():
        where: list[Any] = []
        for x in (part.values, part.rows):
            if x is None:
                where.append(None)
                continue
            found = segments.find(x) if x.is_contiguous() else None
            own = octets(x)
            if found is not None:
                slab, begin = found
                named[slab.number] = slab
                known = slab.checks.get((begin - slab.begin, len(own)))
                place = [slab.segment, begin, checksum(own) if known is None else known]
            else:
                place = [-1, offset, 0]
                body.append(own)
                offset += len(own)
            where.append([DTYPES.index(x.dtype), list(x.shape), *place])
        places.append([key, part.scale, *where])
    return {"kind": kind, "text": text.decode(), "parts": places}, body, named


@dataclass(frozen=True)
class Found:
    """An entry read from a file, and its offset."""

    offset: int
    position: int
    text: dict[str, Any]
    body: Tensor


def read_entries(path: Path, number: int) -> Iterator[Found]:
    """The whole entries of a file, without a torn tail.

    Raises:
        DamageError: the file is damaged otherwise.
    """
    with open(path, "rb") as file:
        size, offset, position = os.fstat(file.fileno()).st_size, 0, 0
        while size - offset >= HEAD_NBYTES:
            head = Head.unpack(file.read(HEAD_NBYTES))
            if head is None or (head.number, head.position) != (number, position):
                why = "no entry begins there" if head is None else "an entry of another place"
                raise DamageError(path, offset, why, position)
            if head.nbytes > size - offset:
                return
            text, body = _content(file, head, path, offset)
            yield Found(offset, position, text, body)
            offset, position = offset + head.nbytes, position + 1


def _content(file: IO[bytes], head: Head, path: Path, offset: int) -> tuple[dict[str, Any], Tensor]:
    raw, body = file.read(head.text_nbytes), bytearray(head.body_nbytes)
    file.readinto(body)  # type: ignore[attr-defined]
    if checksum(memoryview(raw)) ^ checksum(memoryview(body)) != head.check:
        raise DamageError(path, offset, "an entry with a wrong checksum", head.position)
    empty = torch.empty(0, dtype=torch.uint8)
    return json.loads(raw), torch.frombuffer(body, dtype=torch.uint8) if body else empty


def record_of(found: Found, path: Path, segments: Segments) -> Any:
    """The record of an entry.

    Raises:
        DamageError: its bytes in a segment have changed since.
    """
    try:
        parts = {
            key: TensorPart(
                _values(values, found.body, segments),
                scale,
                None if rows is None else _values(rows, found.body, segments),
            )
            for key, scale, values, rows in found.text["parts"]
        }
        return decode(found.text["kind"], found.text["text"].encode(), parts)
    except LookupError as error:
        raise DamageError(path, found.offset, str(error), found.position) from error
    except (MalformedError, RuntimeError, TypeError, ValueError) as error:
        why = f"an entry that is no record ({error})"
        raise DamageError(path, found.offset, why, found.position) from error


def _values(where: list[Any], body: Tensor, segments: Segments) -> Tensor:
    kind, shape, number, begin, check = where
    dtype = DTYPES[kind]
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if number < 0:
        raw = body[begin : begin + nbytes]
    else:
        raw = segments.bytes_at(number, begin, nbytes)
        if checksum(octets(raw)) != check:
            raise LookupError(
                f"bytes {begin:,} to {begin + nbytes:,} of segment-{number} have a wrong checksum"
            )
    return (raw.clone() if begin % dtype.itemsize else raw).view(dtype).view(shape)


def _tag(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=_TAG_NBYTES).digest()
