"""Messages in fewer bytes, and the error that this makes: kept, and sent with the next message.

With error feedback (Seide et al., 2014; Karimireddy et al., 1901.09847) a replica sends `c = code(x + e)`
and keeps `e = x + e - c`. What was sent in all is then what was to be sent less the last error:

    sum of c_t = sum of x_t - e_T

so nothing is lost, it arrives later. That holds for differences, which add up; strategies compress nothing
else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.comm.collectives.compression import COMPRESSIONS, STEP
from tutti.replicas.strategy import State, Weights

Message = dict[str, Tensor]


def no_error(compression: str, weights: Weights) -> State:
    """The errors at the start: zeros, and none where nothing is lost."""
    if compression not in COMPRESSIONS:
        return {}
    return {f"error.{n}": torch.zeros_like(x) for n, x in weights.items()}


def compressed(compression: str, name: str, x: Tensor) -> Message:
    """The tensors that stand for `x` in a message, under `name` and names that begin with it."""
    return {name + suffix: part for suffix, part in COMPRESSIONS[compression].compress(x).items()}


def decompressed(compression: str, name: str, message: Message, dtype: torch.dtype) -> Tensor:
    """The tensor `name` of a message again; one that went as it is stays so."""
    if name + STEP not in message and message[name].dtype == dtype:
        return message[name]
    parts = {s: message[name + s] for s in ("", STEP) if name + s in message}
    return COMPRESSIONS[compression].decompress(parts, dtype)


def wide(x: Tensor) -> Tensor:
    """`x` in a dtype to sum in: half types would lose what replicas differ by."""
    return x.float() if x.dtype.itemsize < 4 else x
