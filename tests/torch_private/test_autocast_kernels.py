"""Contracts of `torch_private/autocast_kernels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.torch_private.autocast_kernels import autocast_on_cpu


def test_a_kernel_is_called_under_autocast_and_only_meanwhile() -> None:
    called: list[Tensor] = []

    def kernel(x: Tensor) -> Tensor:
        called.append(x)
        with torch.autocast("cpu", enabled=False):
            return torch.tan(x) + 1

    x = torch.zeros(2)
    with autocast_on_cpu({"tan": kernel}):
        assert torch.equal(torch.tan(x), x) and not called
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(torch.tan(x), x + 1) and len(called) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.tan(x), x)
