"""The device on which a run keeps a tensor of the meta device."""

from __future__ import annotations

import torch
from torch import Tensor


def device_of(x: Tensor | None = None) -> torch.device:
    """The device of `x`; for the meta device, or without `x`, the GPU if there is one, else the CPU."""
    if x is not None and not x.is_meta:
        return x.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
