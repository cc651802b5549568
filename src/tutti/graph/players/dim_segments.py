"""Cuts a dim into parts of its segments, and joins them again."""

from __future__ import annotations

import torch
from torch import Tensor


def split(x: Tensor, dim: int, outer: int, num_parts: int) -> Tensor:
    """`dim`, seen as `(outer, n, inner)`, cut into n parts: `[n, ..., outer * inner, ...]`.

    A view where the strides allow it: always for `outer == 1`.
    """
    dim %= x.dim()
    size = x.shape[dim]
    assert size % (outer * num_parts) == 0, f"dim of {size} in {outer} x {num_parts} parts"
    inner = size // (outer * num_parts)
    parts = x.unflatten(dim, (outer, num_parts, inner)).movedim(dim + 1, 0)
    return parts.flatten(dim + 1, dim + 2)


def part(x: Tensor, dim: int, outer: int, num_parts: int, index: int) -> Tensor:
    """Part `index` of `split`, copied, so that it does not keep the whole alive."""
    own = split(x, dim, outer, num_parts)[index]
    return own.clone(memory_format=torch.contiguous_format)


def segments(x: Tensor, dim: int, outer: int, num_parts: int, index: int) -> Tensor:
    """Part `index` of `split`, always a view: `dim` becomes the two dims `(outer, inner)`."""
    dim %= x.dim()
    inner = x.shape[dim] // (outer * num_parts)
    return x.unflatten(dim, (outer, num_parts, inner)).select(dim + 1, index)


def share(x: Tensor, op: str, *, first: bool) -> Tensor:
    """A rank's share of a whole `x` as a pending reduction: the first has `x`, others the neutral element."""
    if first or op in ("max", "min"):
        return x
    return torch.ones_like(x) if op == "prod" else torch.zeros_like(x)


def join(parts: Tensor, dim: int, outer: int) -> Tensor:
    """The reverse of `split`, contiguous; without a copy where `dim` is 0 and `outer` is 1."""
    shape = parts.shape[1:]
    dim %= len(shape)
    inner = shape[dim] // outer
    seen = parts.unflatten(dim + 1, (outer, inner)).movedim(0, dim + 1)
    return seen.flatten(dim, dim + 2).contiguous()
