"""Letters between ranks: a topic and named tensors, as bytes; never pickled.

kind   1 byte     a letter, or one byte alone: a heartbeat, goodbye, or "we go on without you"
sizes  12 bytes   of the header and of the payload
header            JSON: the topic; name, dtype and shape of each tensor
payload           the tensors' bytes, each beginning at a multiple of 8
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutti.comm.collectives.payload import DTYPES, octets

LETTER, BEAT, BYE, OUT = b"L", b"B", b"E", b"O"
SIZES = struct.Struct("!IQ")
# The most that a peer may make this process hold.
MAX_HEADER, MAX_PAYLOAD = 2**24, 2**38
_ALIGN = 8
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
_NAMED = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Letter:
    """A message from one rank to another."""

    topic: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def to_bytes(letter: Letter) -> list[memoryview]:
    """The letter's bytes on the wire, views of large tensors, which must not change until sent."""
    parts: list[memoryview] = []
    entries = []
    for name, x in letter.tensors.items():
        entries.append([name, _NAMES[x.dtype], list(x.shape)])
        parts.append(octets(x))
        parts.append(memoryview(bytes(-len(parts[-1]) % _ALIGN)))
    header = json.dumps([letter.topic, entries]).encode()
    sizes = SIZES.pack(len(header), sum(len(part) for part in parts))
    return _joined([memoryview(LETTER + sizes + header), *parts])


def read_header(data: bytes) -> tuple[str, list[tuple[str, torch.dtype, list[int]]]]:
    """The topic, and the tensors of the payload; raises `ValueError` for malformed bytes."""
    topic, entries = json.loads(data)
    if not isinstance(topic, str):
        raise ValueError("a letter without a topic")
    found = []
    for name, dtype, shape in entries:
        if dtype not in _NAMED or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"a tensor {dtype}{shape} in a letter")
        found.append((str(name), _NAMED[dtype], list(shape)))
    return topic, found


def read_payload(
    entries: list[tuple[str, torch.dtype, list[int]]], payload: Tensor
) -> dict[str, Tensor]:
    """The tensors, views of `payload`; raises `ValueError` if its size differs."""
    found, begin = {}, 0
    for name, dtype, shape in entries:
        size = math.prod(shape) * dtype.itemsize
        if begin + size > len(payload):
            raise ValueError("a letter is shorter than it says")
        found[name] = payload[begin : begin + size].view(dtype).view(shape)
        begin += size + -size % _ALIGN
    if begin != len(payload):
        raise ValueError("a letter is longer than it says")
    return found


def _joined(parts: list[memoryview]) -> list[memoryview]:
    """Copies small parts together: each buffer costs a system call."""
    found: list[memoryview] = []
    small = bytearray()
    for part in parts:
        if len(part) < 2**16:
            small += part
            continue
        found += [memoryview(bytes(small)), part] if small else [part]
        small.clear()
    return [*found, memoryview(bytes(small))] if small else found
