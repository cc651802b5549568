"""`torch.bincount` with a `minlength`: the result has this many counts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tutti.graph.ops.counts import bincount


def counts_of(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """In place of `aten.bincount`; without a `minlength` the size depends on values, which is refused."""
    if x.ndim != 1 or x.is_floating_point() or (weights is not None and weights.shape != x.shape):
        return NotImplemented  # PyTorch's own error
    return bincount(x, weights, minlength) if minlength > 0 else NotImplemented
