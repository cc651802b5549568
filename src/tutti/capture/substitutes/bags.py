"""`torch.embedding_bag` as ops with rules of their own: a lookup, then a sum, mean or maximum of a bag.

The replacement is above autograd, which makes the backward from the same ops. Below autograd it would need a
hand-written backward from the op's saved values.

Bags of one length, as of an input (bags, length), are rows: everything splits along them. For other bags each
position has the number of its bag. The sum over a bag is then that of a lookup's backward, which adds rows by
number, in order; each rank may add its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.torch_private.tracing import get_proxy_mode, get_proxy_slot

aten = torch.ops.aten
_PLAIN: Any = torch.embedding_bag
_SUM, _MEAN = 0, 1
_INF = float("inf")
_LINES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, ...]:
    """The results of `torch.embedding_bag`; other ops make only the first, (bags, D).

    The op itself handles gradients that are sparse or scaled by frequency.
    """
    given = (weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights)
    last = (include_last_offset, padding_idx)
    if scale_grad_by_freq or sparse or not indices.numel():
        return _PLAIN(*given, *last)
    # for PyTorch's own checks of the arguments; the node has no users
    values = [x.detach() if isinstance(x, Tensor) else x for x in given]
    _, *rest = _PLAIN(*values, *last)
    bags, kept = _bags(offsets, indices, include_last_offset)
    if padding_idx is not None:
        real = (indices != padding_idx % weight.shape[0]).reshape(bags.shape)
        kept = real if kept is None else kept & real
    rows = torch.embedding(weight, indices.reshape(bags.shape))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(bags.shape).unsqueeze(-1)
    return _pooled(bags, rows, kept, mode), *rest


def _pooled(bags: _Even | _Uneven, rows: Tensor, kept: Tensor | None, mode: int) -> Tensor:
    """`rows` (*shape, D), without those not `kept`, reduced to one row per bag; zeros for an empty bag."""
    if kept is not None:
        rows = rows.masked_fill(~kept.unsqueeze(-1), 0.0 if mode in (_SUM, _MEAN) else -_INF)
    if mode == _SUM:
        return bags.total(rows)
    sizes = bags.sizes(kept, rows.dtype)
    if mode == _MEAN:
        return bags.total(rows) / (sizes.clamp(min=1) if isinstance(sizes, Tensor) else sizes)
    most = bags.largest(rows)
    return most.masked_fill(sizes == 0, 0.0) if isinstance(sizes, Tensor) else most


@dataclass(frozen=True)
class _Even:
    """Bags of one length: positions are (bags, length)."""

    shape: tuple[int, int]

    def total(self, rows: Tensor) -> Tensor:
        return rows.sum(1)

    def sizes(self, kept: Tensor | None, dtype: torch.dtype) -> Tensor | int:
        return self.shape[1] if kept is None else kept.sum(1, keepdim=True, dtype=dtype)

    def largest(self, rows: Tensor) -> Tensor:
        """The gradient goes to the first of equals, as PyTorch's does."""
        return rows.max(1).values


@dataclass(frozen=True)
class _Uneven:
    """Bags of any length: `bag` (positions,) is the number of each position's bag."""

    bag: Tensor
    num_bags: int

    @property
    def shape(self) -> tuple[int]:
        return (self.bag.shape[0],)

    def total(self, rows: Tensor) -> Tensor:
        return aten.embedding_dense_backward.default(rows, self.bag, self.num_bags, -1, False)

    def sizes(self, kept: Tensor | None, dtype: torch.dtype) -> Tensor:
        if kept is None:
            kept = torch.ones_like(self.bag)
        return self.total(kept.to(dtype).unsqueeze(-1))

    def largest(self, rows: Tensor) -> Tensor:
        """The gradient goes to the first of equals, as PyTorch's does."""
        num, width = rows.shape
        index, held = self.bag.unsqueeze(1).expand(num, width), rows.detach()
        size = (self.num_bags, width)
        most = held.new_full(size, -_INF).scatter_reduce(0, index, held, "amax")
        position = torch.arange(num, device=rows.device).unsqueeze(1)
        position = torch.where(held == most.index_select(0, self.bag), position, num)
        first = position.new_full(size, num - 1).scatter_reduce(0, index, position, "amin")
        return rows.gather(0, first)


def _bags(
    offsets: Tensor, indices: Tensor, include_last: bool
) -> tuple[_Even | _Uneven, Tensor | None]:
    """The bags of the positions, and the mask of positions in a bag, None for all."""
    num_bags, num = offsets.shape[0] - include_last, indices.shape[0]
    length = _step(offsets)
    if length is not None and num_bags * length == num:
        return _Even((num_bags, length)), None
    position = torch.arange(num, dtype=offsets.dtype, device=offsets.device)
    bag = torch.searchsorted(offsets[:num_bags], position, right=True) - 1
    return _Uneven(bag, num_bags), position < offsets[-1] if include_last else None


def _step(offsets: Tensor) -> int | None:
    """The length of bags whose offsets are 0, length, 2 length, ... in the trace."""
    mode: Any = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(offsets, mode.tracer, None)
    node: Any = None if slot is None else slot.proxy.node
    if getattr(node, "target", None) not in _LINES:
        return None
    args = node.args
    first, step = args[0] if len(args) > 1 else 0, args[2] if len(args) > 2 else 1
    return step if first == 0 and isinstance(step, int) and step > 0 else None
