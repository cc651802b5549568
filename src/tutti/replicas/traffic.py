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


def encoded(coding: str, message: Message, state: State) -> tuple[State, Message]:
    """The errors that remain, and the message as it travels; what has no error goes as it is."""
    if coding not in CODINGS:
        return {}, message
    errors: State = {}
    sent: Message = {}
    for name, x in message.items():
        if f"error.{name}" not in state:
            sent[name] = x
            continue
        due = x + state[f"error.{name}"]
        parts = CODINGS[coding].encode(due)
        errors[f"error.{name}"] = due - CODINGS[coding].decode(parts, due.dtype)
        sent |= {name + suffix: part for suffix, part in parts.items()}
    return errors, sent


def decoded(coding: str, sent: Message, dtypes: Mapping[str, torch.dtype]) -> Message:
    """The message again; `dtypes` are those of its tensors before they were coded."""
    if coding not in CODINGS:
        return sent
    found: Message = {}
    for name, dtype in dtypes.items():
        parts = {suffix: sent[name + suffix] for suffix in ("", _STEP) if name + suffix in sent}
        coded = parts[""].dtype != dtype
        found[name] = CODINGS[coding].decode(parts, dtype) if coded else parts[""]
    return found


def mean(messages: list[Message]) -> Message:
    """The mean of each tensor over the messages, summed in their order."""
    totals: Message = {}
    for name, first in messages[0].items():
        totals[name] = wide(first).clone()
        for other in messages[1:]:
            totals[name] += wide(other[name])
    return shares(totals, len(messages), messages[0])


def wide(x: Tensor) -> Tensor:
    """`x` in a dtype to sum in: half types would lose what replicas differ by."""
    return x.float() if x.dtype.itemsize < 4 else x


def shares(totals: Message, count: int, like: Message) -> Message:
    """The means from the sums, in the dtypes of `like`."""
    return {n: (x / count).to(like[n].dtype) for n, x in totals.items()}
