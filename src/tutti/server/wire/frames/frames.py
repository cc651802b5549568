"""Frames: a fixed header, then a payload of the size in the header.

    offset  field      type
    0       magic      4 bytes  b"tuti"
    4       version    u8       1
    5       kind       u8       a message's (codec.KINDS), or 255: a part of the message before it;
                                254: the same, and its bytes lie in shared memory from `check` on
    6       dtype      u8       of a part's values (comm/collectives/payload.py)
    7       ndim       u8       of a part: 0 to 8
    8       number     u64      of the request; its reply has the same
    16      key        u64      of a part's block; in a message's frame, how many parts follow
    24      scale      f64      of a part
    32      num_rows   u64      of a part: so many row numbers (i64) come before the values; 2^64 - 1: dense
    40      nbytes     u64      that follow the header: text, or row numbers and values
    48      shape      8 x u64  of a part's values
    112     check      u64      of these bytes; 0: not taken, under TLS, which does it, and within a host
    120     tag        u64      of this header and its place in the stream, keyed with the session's key

All little-endian. The receiver checks a header against the limits of its kind before it allocates memory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest

import numpy as np
import torch
from torch import Tensor

from tutti.comm.collectives.payload import DTYPES
from tutti.server.protocol.messages import TensorPart
from tutti.server.wire.frames.codec import MalformedError

MAGIC, VERSION = b"tuti", 1
PART, SHARED_PART = 255, 254
_HEADER = struct.Struct("<4sBBBBQQdQQ8QQ8s")
HEADER_NBYTES = _HEADER.size
_DENSE = 2**64 - 1
_WORDS = 512  # of 8 bytes; the number of columns of a checksum
_ROW_NBYTES = 8 * _WORDS
_TAG_NBYTES = 8


@dataclass(frozen=True)
class Header:
    """A frame's header; see above. `num_rows` is None for a dense part."""

    kind: int
    number: int
    key: int
    nbytes: int
    check: int = 0
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    scale: float = 1.0
    num_rows: int | None = None


class Seal:
    """Tags for the headers of one direction of a connection: nobody else can make, move or omit one."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def next(self, header: bytes | memoryview) -> bytes:
        """The tag of the next header (its first 120 bytes)."""
        self._count += 1
        count = self._count.to_bytes(8, "little")
        return blake2b(header, digest_size=_TAG_NBYTES, key=self._key, salt=count).digest()


class Checksum:
    """A payload's checksum: columns of words added up at the speed of memory, and the hash of these sums.

    It detects accidental errors. TLS protects against an attacker on the network.
    """

    def __init__(self) -> None:
        self._columns: np.ndarray | None = None

    def add(self, data: memoryview) -> int:
        """Add the next bytes, as far as they fill rows; the number of bytes taken."""
        whole = len(data) // _ROW_NBYTES * _ROW_NBYTES
        if whole:
            words = np.frombuffer(data[:whole], np.uint64).reshape(-1, _WORDS)
            found = np.add.reduce(words, axis=0)
            self._columns = found if self._columns is None else self._columns + found
        return whole

    def value(self, rest: memoryview, nbytes: int) -> int:
        """The checksum including the `rest`, of `nbytes` in all."""
        found = blake2b(nbytes.to_bytes(8, "little"), digest_size=8)
        if self._columns is not None:
            found.update(self._columns.data)
        found.update(rest)
        return int.from_bytes(found.digest(), "little") or 1  # 0 means none


def checksum(data: memoryview) -> int:
    """The checksum of all of `data`."""
    found = Checksum()
    return found.value(data[found.add(data) :], len(data))


def pack(header: Header, seal: Seal) -> bytes:
    """A header's bytes."""
    shape = header.shape + (0,) * (8 - len(header.shape))
    rows = _DENSE if header.num_rows is None else header.num_rows
    raw = _HEADER.pack(
        MAGIC,
        VERSION,
        header.kind,
        DTYPES.index(header.dtype),
        len(header.shape),
        header.number,
        header.key,
        header.scale,
        rows,
        header.nbytes,
        *shape,
        header.check,
        bytes(_TAG_NBYTES),
    )
    return raw[:-_TAG_NBYTES] + seal.next(raw[:-_TAG_NBYTES])


def unpack(raw: bytes | bytearray, seal: Seal) -> Header:
    """Read a header.

    Raises:
        MalformedError: the bytes are no header, or belong to another place in the connection.
    """
    magic, version, kind, dtype, ndim, number, key, scale, rows, nbytes, *rest = _HEADER.unpack(raw)
    *shape, check, tag = rest
    if not compare_digest(tag, seal.next(memoryview(raw)[:-_TAG_NBYTES])):
        raise MalformedError("a header with a wrong tag")
    if magic != MAGIC or version != VERSION:
        raise MalformedError("another protocol, or another version of it")
    if dtype >= len(DTYPES) or ndim > 8 or any(shape[ndim:]):
        raise MalformedError("an unknown dtype or an invalid shape")
    num_rows = None if rows == _DENSE else rows
    return Header(
        kind, number, key, nbytes, check, DTYPES[dtype], tuple(shape[:ndim]), scale, num_rows
    )


def part_header(number: int, key: int, part: TensorPart, check: int, kind: int = PART) -> Header:
    """The header of a part's frame."""
    rows = None if part.rows is None else len(part.rows)
    nbytes = part.values.nbytes + 8 * (rows or 0)
    shape = tuple(part.values.shape)
    dtype = part.values.dtype
    return Header(kind, number, key, nbytes, check, dtype, shape, part.scale, rows)


def check_part(header: Header, limit: int) -> None:
    """Raise `MalformedError` unless a part's lengths and shape agree and are within `limit` bytes."""
    size = header.dtype.itemsize
    for length in header.shape:
        size *= length
        if size > limit:
            break
    rows = header.num_rows or 0
    if header.nbytes > limit or rows > limit or size + 8 * rows != header.nbytes:
        raise MalformedError("a part with lengths that do not agree, or too large")
    if header.num_rows is not None and header.shape[:1] != (rows,):
        raise MalformedError("a part with more rows than its tensor")


def read_part(header: Header, payload: Tensor) -> TensorPart:
    """The part with the bytes `payload` (uint8, 1-D); its tensors are views of these, if aligned."""
    begin = 8 * (header.num_rows or 0)
    rows = None if header.num_rows is None else payload[:begin].view(torch.int64)
    flat = payload[begin : header.nbytes]
    if begin % header.dtype.itemsize:
        flat = flat.clone()
    values = flat.view(header.dtype).view(header.shape)
    return TensorPart(values, header.scale, rows)
