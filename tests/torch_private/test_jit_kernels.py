"""Contracts of `torch_private/jit_kernels.py`."""

from __future__ import annotations

import pytest
import torch

from tutti.torch_private.jit_kernels import jit_kernel

CODE = "template <typename T> T combined(T x, T y, T factor) { return x * factor + y; }"


def test_code_is_read_without_a_gpu() -> None:
    kernel = jit_kernel(CODE, factor=1)
    if not torch.cuda.is_available():
        with pytest.raises(AssertionError, match="GPU"):
            kernel(torch.ones(2), torch.ones(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: its kernel not run")
def test_operands_broadcast_and_numbers_change() -> None:
    kernel = jit_kernel(CODE, factor=1)
    x = torch.arange(3, dtype=torch.int32, device="cuda")
    for factor in (1, -7, 2**31 - 1):
        want = (x[:, None].long() * factor + x[None]).int()
        assert torch.equal(kernel(x[:, None], x[None], factor=factor), want)
