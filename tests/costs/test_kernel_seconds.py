"""The seconds of a kernel, and what they are for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tutti.costs.kernel_seconds import (
    ARITHMETIC,
    LAUNCHES,
    MEMORY,
    kernel_seconds,
    limited_seconds,
)
from tutti.costs.kernels import DeviceKernel, kernels_of
from tutti.hardware.cluster import Cluster

DEVICE = Cluster.parse("8 x h100").device


def kernel(function: Any, *shape: int) -> DeviceKernel:
    """The one kernel of a function of two equal tensors."""
    given = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    graph = make_fx(function, tracing_mode="fake")(*given).graph
    (found,) = kernels_of(graph, fused=False)
    return found


@pytest.mark.parametrize(
    ("function", "size", "limit"),
    [
        (torch.mm, 8, LAUNCHES),
        (torch.add, 8, LAUNCHES),
        (torch.add, 8192, MEMORY),
        (torch.mm, 8192, ARITHMETIC),
    ],
)
def test_a_kernel_says_what_its_seconds_are_for(function: Any, size: int, limit: str) -> None:
    one = kernel(lambda x, y: function(x, y), size, size)
    assert limited_seconds(one, DEVICE) == (kernel_seconds(one, DEVICE), limit)
    moved = 3 * 2 * size**2 / (DEVICE.bandwidth.value * DEVICE.memory_efficiency.value)
    closed = {
        LAUNCHES: DEVICE.host_seconds.value,
        MEMORY: DEVICE.kernel_seconds.value + moved,
        ARITHMETIC: 2 * size**3 / DEVICE.peak_of(torch.bfloat16),  # at most
    }[limit]
    assert kernel_seconds(one, DEVICE) >= closed
    if limit != ARITHMETIC:
        assert kernel_seconds(one, DEVICE) == pytest.approx(closed)


def test_a_program_that_launches_nothing_is_for_its_gaps_or_bytes() -> None:
    """Without a host's launches, a small kernel takes the gap between two."""
    one = kernel(lambda x, y: x + y, 8, 8)
    seconds, limit = limited_seconds(one, DEVICE, eager=False)
    assert limit == LAUNCHES and seconds == pytest.approx(DEVICE.kernel_seconds.value, rel=0.01)
