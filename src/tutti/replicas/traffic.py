"""Compressed messages with error feedback: the rounding error goes with the next message.

With error feedback (Seide et al., 2014; Karimireddy et al., 1901.09847) a replica sends `c = code(x + e)`
and keeps `e = x + e - c`. The sum of all messages is then the sum of their exact values less the last error:

    sum of c_t = sum of x_t - e_T

so nothing is lost, it arrives later. That holds for differences, which add up; strategies compress only
differences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.comm.collectives.compression import COMPRESSIONS, STEP
from tutti.replicas.strategy import State, Weights

Message = dict[str, Tensor]


def no_error(compression: str, weights: Weights) -> State:
    """The initial errors: zeros, and none for a lossless format."""
    if compression not in COMPRESSIONS:
        return {}
    return {f"error.{n}": torch.zeros_like(x) for n, x in weights.items()}


def compressed(compression: str, name: str, x: Tensor) -> Message:
    """The tensors that encode `x` in a message, under `name` and names that begin with it."""
    return {name + suffix: part for suffix, part in COMPRESSIONS[compression].compress(x).items()}


def decompressed(compression: str, name: str, message: Message, dtype: torch.dtype) -> Tensor:
    """Decode the tensor `name` of a message; an uncompressed one is returned unchanged."""
    if name + STEP not in message and message[name].dtype == dtype:
        return message[name]
    parts = {s: message[name + s] for s in ("", STEP) if name + s in message}
    return COMPRESSIONS[compression].decompress(parts, dtype)


def wide(x: Tensor) -> Tensor:
    """`x` in a dtype for sums: half types would lose the differences between replicas."""
    return x.float() if x.dtype.itemsize < 4 else x
