"""Tensors as bytes between processes and in files: which dtypes, and the bytes of one tensor."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# A dtype's position is its code in the frames, journals and snapshots of servers: new ones go to the end.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def octets(x: Tensor) -> memoryview:
    """The bytes of a tensor; a view if it is contiguous and on the CPU."""
    flat = x.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy().data)


def digest(x: Tensor) -> str:
    """Sixteen letters: a hash of the values of `x`."""
    return hashlib.sha256(octets(x)).hexdigest()[:16]
