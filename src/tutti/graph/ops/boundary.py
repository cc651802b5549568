"""Marks in a graph: where regions meet, and where the user asked for a sharding.

Both are identities on values. `boundary` stands where a weight enters the forward or backward and where a
gradient enters the update, so that each side may lie differently. `shard_as` carries the user's word.
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
    """The gradient lies as the value does."""

    @staticmethod
    def forward(ctx, x: Tensor, sharding: str) -> Tensor:
        ctx.sharding = sharding
        return shard_as_op(x, sharding)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        return shard_as_op(grad_outputs[0], ctx.sharding), None


def shard_as(x: Tensor, sharding: str) -> Tensor:
    """Hint that `x` lie as `sharding` says, one entry per dim: `"data, tensor, -"`.

    Outside a captured step it returns `x` itself. Axes that the layout lacks are ignored.
    """
    from tutti.torch_private.fake_tensors import FakeTensor

    return _ShardAs.apply(x, sharding) if isinstance(x, FakeTensor) else x
