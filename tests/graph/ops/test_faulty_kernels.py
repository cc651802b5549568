"""Fused kernels that are wrong in some entries are found, and are used in no step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import tutti
from small_steps import trained
from tutti.graph.ops import fused_updates
from tutti.graph.ops.faulty_kernels import is_faulty
from tutti.graph.ops.fused_updates import KERNELS, Kernel

CPU = torch.device("cpu")
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BY_NAME = {k.name: k for k in KERNELS}


@pytest.fixture(autouse=True)
def untried() -> None:
    is_faulty.cache_clear()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_kernel_that_is_right_everywhere_is_used(kernel: Kernel, dtype: torch.dtype) -> None:
    """PyTorch's own step without the kernel says which are right."""
    if kernel.name == "sgd":
        p = nn.Parameter(torch.ones(67, dtype=dtype))
        p.grad = torch.ones_like(p)
        torch.optim.SGD([p], lr=0.5, fused=True).step()
        assert is_faulty(kernel, CPU, dtype) == (not bool((p == 0.5).all()))
    else:
        assert not is_faulty(kernel, CPU, dtype)


@pytest.mark.parametrize("entries", [slice(0, 32), slice(64, None), slice(5, 6)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_kernel_that_leaves_entries_as_they_were_is_found(kernel: Kernel, entries: slice) -> None:
    right = fused_updates._FUSED[kernel.name]

    def wrong(params: list[Tensor], *lists: Any, **numbers: Any) -> None:
        before = [p[entries].clone() for p in params]
        right(params, *lists, **numbers)
        for p, old in zip(params, before, strict=True):
            p[entries] = old

    with mock.patch.dict(fused_updates._FUSED, {kernel.name: wrong}):
        assert is_faulty(kernel, CPU, torch.float32)
    is_faulty.cache_clear()
    assert not is_faulty(kernel, CPU, torch.float32)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_trains_by_sgd_as_eagerly(
    dtype: torch.dtype, momentum: float
) -> None:
    ends = []
    for played in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        step: Any = trained(_loss)
        x = torch.randn(8, 4).to(dtype)
        play = tutti.distribute(step, model, optimizer, "") if played else None
        for _ in range(3):
            play(x) if play else step(model, optimizer, x)
        ends.append([p.detach().float() for p in model.parameters()])
    for expected, found in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)
