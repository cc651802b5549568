"""Tensors in fewer bytes.

compression   bytes an element   how
fp32          as it is           unchanged
bf16          2                  rounded to the nearest bfloat16
int8          1                  clipped at 6 standard deviations of the tensor, 255 even steps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_SIGMAS, _LEVELS = 6.0, 127
# The suffix of a tensor's scale in a message.
STEP = " step"


@dataclass(frozen=True)
class Compression:
    """Encodes a tensor as tensors in fewer bytes (by a suffix of its name), and decodes them."""

    compress: Callable[[Tensor], dict[str, Tensor]]
    decompress: Callable[[Mapping[str, Tensor], torch.dtype], Tensor]


def _to_int8(x: Tensor) -> dict[str, Tensor]:
    wide = x.float()
    step = _deviation(wide) * (_SIGMAS / _LEVELS)
    step = torch.where(step > 0, step, torch.ones_like(step))  # zeros may have any scale
    codes = (wide / step).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return {"": codes, STEP: step}


def _deviation(x: Tensor) -> Tensor:
    """The root of the mean square: around zero, so that values far from zero are not all clipped."""
    if not x.numel():
        return x.new_zeros(())
    # Squares of very large or small values would leave the range of float32.
    largest = x.abs().amax()
    return torch.where(largest > 0, (x / largest).square().mean().sqrt() * largest, largest)


def _from_int8(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return (parts[""].float() * parts[STEP]).to(dtype)


COMPRESSIONS: dict[str, Compression] = {
    "bf16": Compression(
        lambda x: {"": x.to(torch.bfloat16)}, lambda parts, dtype: parts[""].to(dtype)
    ),
    "int8": Compression(_to_int8, _from_int8),
}
NAMES = ("fp32", *COMPRESSIONS)
# Bytes per element of a compressed tensor.
NBYTES = {"bf16": 2, "int8": 1}
