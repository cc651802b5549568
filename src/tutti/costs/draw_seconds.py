"""The time of random numbers: tutti draws them by a few kernels a tensor, not by one.

    %1 = draw("bernoulli", [8, 1024], [0.9], bool)    keys, hash, comparison: 9 bytes an element

The kernels are those of a draw on a tensor without memory, counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from tutti.costs.kernel_seconds import LAUNCHES, MEMORY
from tutti.graph.analysis.draws import is_draw
from tutti.graph.randomness.draw import drawn
from tutti.graph.randomness.random import RandomBlock
from tutti.hardware.accelerator import Device
from tutti.torch_private.dispatch_modes import TorchDispatchMode
from tutti.torch_private.pytrees import tree_leaves


def draw_seconds(
    graph: fx.Graph, device: Device, *, eager: bool = True
) -> dict[fx.Node, tuple[float, str]]:
    """Seconds of each draw of a graph, and what most of them are for: launches or memory.

    Args:
        graph: a captured or partitioned program with fake values.
        device: with its bandwidth and the host's time for an op.
        eager: each op is launched by the host when its turn comes.
    """
    rate = device.bandwidth.value * device.memory_efficiency.value
    least = device.host_seconds.value if eager else 0.0
    found: dict[fx.Node, tuple[float, str]] = {}
    for node in graph.nodes:
        if is_draw(node):
            moving = [nbytes / rate for nbytes in _moved_by(node)]
            seconds = sum(max(least, device.kernel_seconds.value + x) for x in moving)
            found[node] = seconds, MEMORY if 2 * sum(moving) > seconds else LAUNCHES
    return found


def _moved_by(node: fx.Node) -> tuple[int, ...]:
    given: Any = node.args
    kind, _, params, dtype = given[:4]
    return kernel_nbytes(kind, tuple(map(int, node.meta["val"].shape)), tuple(params), dtype)


@lru_cache(maxsize=4096)
def kernel_nbytes(
    kind: str, shape: tuple[int, ...], params: tuple[float, ...], dtype: torch.dtype
) -> tuple[int, ...]:
    """Bytes that each kernel of a draw reads and writes, in order."""
    meta = torch.device("meta")
    index = [torch.empty(n, dtype=torch.int64, device=meta) for n in shape]
    block: Any = RandomBlock.of(index, shape, meta)
    counting = _Counting()
    with counting:
        drawn(kind, params, dtype, meta, 0, block, shape)
    return tuple(counting.moved)


class _Counting(TorchDispatchMode):
    """Notes the bytes of each op that reads or writes memory of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func is torch.ops.aten.empty.memory_format):
            read_and_written = tree_leaves((args, result))  # `out` is a result
            tensors = [
                x for x in read_and_written if isinstance(x, Tensor) and x.device.type == "meta"
            ]
            self.moved.append(sum(x.nbytes for x in tensors))
        return result
