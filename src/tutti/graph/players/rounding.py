"""The effect of rounding on the values of a graph: every result gets a random error of its last places.

    result * (1 + e u),   u uniform in [-4, 4],   e the step between 1 and the next number of its type

Two right programs differ in where they round. Another run of one device with random errors of that size
shows how much of a difference rounding explains, entry by entry (Parker, "Monte Carlo Arithmetic", 1997).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

# Ops that choose or move entries of their operands and round nothing: a mask made by comparing their results
# with their operands (the backward of `amax`) must find the same entries.
_EXACT = frozenset(
    {
        "_reshape_alias",
        "_to_copy",
        "_unsafe_index",
        "_unsafe_view",
        "abs",
        "adaptive_max_pool2d",
        "alias",
        "alias_copy",
        "amax",
        "amin",
        "arange",
        "as_strided",
        "boundary",
        "bucketize",
        "cat",
        "ceil",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clone",
        "constant_pad_nd",
        "copy",
        "cummax",
        "cummin",
        "detach",
        "diagonal",
        "embedding",
        "empty",
        "expand",
        "eye",
        "fill",
        "flip",
        "floor",
        "full",
        "full_like",
        "gather",
        "getitem",
        "hardtanh",
        "index",
        "index_select",
        "kthvalue",
        "leaky_relu",
        "lift_fresh",
        "lift_fresh_copy",
        "masked_fill",
        "masked_select",
        "max",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "maximum",
        "median",
        "min",
        "minimum",
        "neg",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones",
        "ones_like",
        "permute",
        "reflection_pad1d",
        "reflection_pad2d",
        "relu",
        "repeat",
        "replication_pad2d",
        "reshape",
        "roll",
        "round",
        "scalar_tensor",
        "select",
        "select_backward",
        "select_scatter",
        "shard_as",
        "sign",
        "slice",
        "slice_backward",
        "slice_scatter",
        "sort",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "t",
        "threshold",
        "threshold_backward",
        "topk",
        "transpose",
        "tril",
        "triu",
        "trunc",
        "unbind",
        "unfold",
        "unsqueeze",
        "upsample_nearest2d",
        "view",
        "view_as_complex",
        "view_as_real",
        "where",
        "zeros",
        "zeros_like",
    }
)
PLACES = 4.0
# A number of so much shorter a type that it has not been rounded: counts, masks, inputs.
_SHORTER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}


class Rounding:
    """One sample of errors; the same number and order of values give the same errors."""

    def __init__(self, sample: int) -> None:
        self._sample, self._count = sample, 0

    def of(self, node: fx.Node, value: Any) -> Any:
        """The value of `node` with errors added."""
        if node.op != "call_function" or _name(node) in _EXACT:
            return value
        return self._inexact(value)

    def _inexact(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._inexact, value))
        if not isinstance(value, Tensor):
            return value
        if value.is_complex():
            return torch.view_as_complex(self._inexact(torch.view_as_real(value.resolve_conj())))
        if not value.is_floating_point() or not value.numel():
            return value
        errors = self._drawn(value) * torch.finfo(value.dtype).eps
        made = value + value * errors.to(value.dtype)
        short = _SHORTER.get(value.dtype)
        if short is None:
            return torch.where(value == value.round(), value, made)
        return torch.where(value == value.to(short).to(value.dtype), value, made)

    def _drawn(self, like: Tensor) -> Tensor:
        self._count += 1
        generator = torch.Generator(like.device).manual_seed(self._count << 8 | self._sample)
        drawn = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        return drawn.uniform_(-PLACES, PLACES, generator=generator)


def _name(node: fx.Node) -> str:
    """The op without its namespace and overload."""
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet or node.target, "__name__", "").rpartition("::")[2]
