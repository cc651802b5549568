"""Records in a file, one after the other, each with a checksum: what was torn off at the end is left out.

An entry: the lengths of its text and of its bytes (u64 each), the hash of both, the text, the bytes. The text
says what the record is and where each of its tensors lies: in the bytes of the entry, or in a slab.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from tutti.comm.payload import DTYPES, octets
from tutti.server.codec import decode, encode
from tutti.server.frames import checksum
from tutti.server.messages import Part

_ENTRY = struct.Struct("<QQQ")
_ALIGNED = 64


@dataclass(eq=False)
class Slab:
    """Memory for the parts of one push.

    used: bytes given out.  waits: dealt with, but perhaps not applied.
    """

    number: int
    memory: Tensor
    mapping: mmap.mmap | None = None
    used: int = 0
    waits: bool = False

    def place(self, nbytes: int) -> Tensor:
        """Room for a part.

        Raises:
            MemoryError: there is none left.
        """
        begin = self.used
        self.used += -(-nbytes // _ALIGNED) * _ALIGNED
        if self.used > len(self.memory):
            raise MemoryError("a push that is larger than its slab")
        return self.memory[begin : begin + nbytes]

    def flush(self) -> None:
        """Bring its bytes to the disk."""
        if self.mapping is not None:
            self.mapping.flush()

    def holds(self, address: int) -> bool:
        """Whether a tensor that begins there lies in it."""
        return 0 <= address - self.memory.data_ptr() < len(self.memory)


class Journal:
    """The file that is written."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  # closed by `close`
        self._fsync = fsync
        self.num_records = 0

    def write(self, record: Any, slabs: list[Slab]) -> set[int]:
        """Append a record; the slabs that it names."""
        text, body, named = entry(record, slabs)
        if self._fsync:
            for number in named:
                # what lies in the slab must be on the disk before the record that names it
                slabs[number].flush()
        write_entry(self._file, text, body)
        if self._fsync:
            os.fsync(self._file.fileno())
        self.num_records += 1
        return named

    def close(self) -> None:
        """No more records."""
        self._file.close()


def entry(record: Any, slabs: list[Slab]) -> tuple[dict[str, Any], list[memoryview], set[int]]:
    """A record as text and bytes; tensors that lie in a slab are named, not copied."""
    kind, text, parts = encode(record)
    places, body, named, offset = [], [], set(), 0
    for key, part in parts.items():
        where = []
        for x in (part.values, part.rows):
            if x is None:
                where.append(None)
                continue
            slab = next((s for s in slabs if x.numel() and s.holds(x.data_ptr())), None)
            if slab is not None and x.is_contiguous():
                begin = x.data_ptr() - slab.memory.data_ptr()
                named.add(slab.number)
                where.append([DTYPES.index(x.dtype), list(x.shape), slab.number, begin])
            else:
                where.append([DTYPES.index(x.dtype), list(x.shape), -1, offset])
                body.append(octets(x))
                offset += len(body[-1])
        places.append([key, part.scale, *where])
    return {"kind": kind, "text": text.decode(), "parts": places}, body, named


def write_entry(file: IO[bytes], text: dict[str, Any], body: list[memoryview]) -> None:
    """Append an entry."""
    raw = json.dumps(text, separators=(",", ":")).encode()
    whole = body[0] if len(body) == 1 else memoryview(b"".join(body))
    check = checksum(memoryview(raw)) ^ checksum(whole)
    for piece in (memoryview(_ENTRY.pack(len(raw), len(whole), check) + raw), whole):
        while len(piece):
            piece = piece[file.write(piece) :]


def read_entries(path: Path) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The text and bytes of each whole entry of a file."""
    with open(path, "rb") as file:
        while len(head := file.read(_ENTRY.size)) == _ENTRY.size:
            text_nbytes, body_nbytes, check = _ENTRY.unpack(head)
            left = os.fstat(file.fileno()).st_size - file.tell()
            if text_nbytes + body_nbytes > left:
                return
            raw = file.read(text_nbytes)
            body = bytearray(body_nbytes)
            file.readinto(body)
            if checksum(memoryview(raw)) ^ checksum(memoryview(body)) != check:
                return
            found = (
                torch.frombuffer(body, dtype=torch.uint8)
                if body
                else torch.empty(0, dtype=torch.uint8)
            )
            yield json.loads(raw), found


def records(path: Path, slabs: list[Slab]) -> Iterator[Any]:
    """The records of a journal again."""
    for text, body in read_entries(path):
        yield record_of(text, body, slabs)


def record_of(text: dict[str, Any], body: Tensor, slabs: list[Slab]) -> Any:
    """One record again, from its entry."""
    parts = {
        key: Part(
            _found(values, body, slabs), scale, None if rows is None else _found(rows, body, slabs)
        )
        for key, scale, values, rows in text["parts"]
    }
    return decode(text["kind"], text["text"].encode(), parts)


def _found(where: list[Any], body: Tensor, slabs: list[Slab]) -> Tensor:
    dtype, shape, number, begin = DTYPES[where[0]], where[1], where[2], where[3]
    memory = body if number < 0 else slabs[number].memory
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = memory[begin : begin + nbytes]
    return (raw.clone() if begin % dtype.itemsize else raw).view(dtype).view(shape)
