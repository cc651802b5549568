"""Marks in a graph: boundaries of regions, and shardings that the user asks for.

Both are identities on values. `boundary` marks a weight that enters the forward or backward, and a gradient
that enters the update: its two sides may differ in sharding. `shard_as` carries the user's sharding.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("tutti", "FRAGMENT")
_LIBRARY.define("boundary(Tensor x) -> Tensor")
_LIBRARY.define("shard_as(Tensor x, str sharding) -> Tensor")


@torch.library.register_fake("tutti::boundary", lib=_LIBRARY)
def _fake_boundary(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("tutti::shard_as", lib=_LIBRARY)
def _fake_shard_as(x: Tensor, sharding: str) -> Tensor:
    return torch.empty_like(x)


boundary = torch.ops.tutti.boundary.default
shard_as_op = torch.ops.tutti.shard_as.default
IDENTITIES = (boundary, shard_as_op)


class _ShardAs(torch.autograd.Function):
    """The gradient has the sharding of the value."""

    @staticmethod
    def forward(ctx, x: Tensor, sharding: str) -> Tensor:
        ctx.sharding = sharding
        return shard_as_op(x, sharding)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        return shard_as_op(grad_outputs[0], ctx.sharding), None


def shard_as(x: Tensor, sharding: str) -> Tensor:
    """Hint that `x` have this sharding, one entry per dim: `"data, tensor, -"`.

    Outside a captured step it returns `x` itself. It ignores axes that the layout lacks.
    """
    from tutti.torch_private.fake_tensors import FakeTensor

    return _ShardAs.apply(x, sharding) if isinstance(x, FakeTensor) else x
