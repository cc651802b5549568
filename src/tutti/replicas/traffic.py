"""Messages in fewer bytes, and the error that this makes: kept, and sent with the next message.

    coding   bytes an element   how
    fp32     as the weight      unchanged
    bf16     2                  rounded to the nearest bfloat16
    int8     1                  clipped at 6 standard deviations of the tensor, 255 even steps

With error feedback (Seide et al., 2014; Karimireddy et al., 1901.09847) a replica sends `c = code(x + e)`
and keeps `e = x + e - c`. What was sent in all is then what was to be sent less the last error:

    sum of c_t = sum of x_t - e_T

so nothing is lost, it arrives later. That holds for differences, which add up; strategies code nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.replicas.strategy import State, Weights

Message = dict[str, Tensor]
_SIGMAS, _LEVELS = 6.0, 127
_STEP = " step"


@dataclass(frozen=True)
class Coding:
    """How one tensor becomes those that travel (by a suffix of its name), and one again."""

    encode: Callable[[Tensor], dict[str, Tensor]]
    decode: Callable[[Mapping[str, Tensor], torch.dtype], Tensor]


def _to_int8(x: Tensor) -> dict[str, Tensor]:
    wide = x.float()
    step = _deviation(wide) * (_SIGMAS / _LEVELS)
    step = torch.where(step > 0, step, torch.ones_like(step))  # zeros may have any scale
    codes = (wide / step).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return {"": codes, _STEP: step}


def _deviation(x: Tensor) -> Tensor:
    """The root of the mean square: around zero, so that values which all lie far from it are not clipped."""
    if not x.numel():
        return x.new_zeros(())
    largest = (
        x.abs().amax()
    )  # squares of what is very large or small would leave the range of float32
    return torch.where(largest > 0, (x / largest).square().mean().sqrt() * largest, largest)


def _from_int8(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return (parts[""].float() * parts[_STEP]).to(dtype)


CODINGS: dict[str, Coding] = {
    "bf16": Coding(lambda x: {"": x.to(torch.bfloat16)}, lambda parts, dtype: parts[""].to(dtype)),
    "int8": Coding(_to_int8, _from_int8),
}
NAMES = ("fp32", *CODINGS)


def no_error(coding: str, weights: Weights) -> State:
    """The errors at the start: zeros, and none where nothing is lost."""
    if coding not in CODINGS:
        return {}
    return {f"error.{n}": torch.zeros_like(x) for n, x in weights.items()}


def encoded(coding: str, name: str, x: Tensor) -> Message:
    """The tensors that stand for `x` in a message, under `name` and names that begin with it."""
    return {name + suffix: part for suffix, part in CODINGS[coding].encode(x).items()}


def decoded(coding: str, name: str, message: Message, dtype: torch.dtype) -> Tensor:
    """The tensor `name` of a message again; one that went as it is stays so."""
    if name + _STEP not in message and message[name].dtype == dtype:
        return message[name]
    parts = {s: message[name + s] for s in ("", _STEP) if name + s in message}
    return CODINGS[coding].decode(parts, dtype)


def wide(x: Tensor) -> Tensor:
    """`x` in a dtype to sum in: half types would lose what replicas differ by."""
    return x.float() if x.dtype.itemsize < 4 else x
