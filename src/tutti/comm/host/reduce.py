"""Reduces a few tensors in one order, so that every rank gets the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_PAIRWISE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}
# A bool holds 0 or 1, so its sum ("or") is a max and its product ("and") a min.
BOOL_OPS = {"sum": "max", "prod": "min", "max": "max", "min": "min"}
_HALF = (torch.bfloat16, torch.float16)
# The dtypes in which torch computes; others are widened.
_KNOWN = frozenset(
    {torch.float64, torch.float32, *_HALF, torch.complex64, torch.complex128}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)
# Bytes reduced at once: the intermediate results stay in the cache.
_BLOCK_NBYTES = 2**18


def reduce_into(out: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Set `out` to `parts[0] op parts[1] op ...`; it may be any of the parts.

    Three or more half-precision numbers are added in float32 and rounded once.
    """
    assert not (out.is_complex() and op in ("max", "min")), f"no {op} of complex numbers"
    if out.dtype == torch.bool:
        out, parts, op = out.view(torch.uint8), [p.view(torch.uint8) for p in parts], BOOL_OPS[op]
    pairwise = _PAIRWISE[op]
    if len(parts) == 1:
        out.copy_(parts[0])
    elif out.dtype not in _KNOWN or (out.dtype in _HALF and len(parts) > 2):
        _reduce_wide(out, parts, pairwise)
    elif len(parts) == 2:
        pairwise(parts[0], parts[1], out=out)
    else:
        total = pairwise(parts[0], parts[1])
        for part in parts[2:-1]:
            pairwise(total, part, out=total)
        pairwise(total, parts[-1], out=out)


def reduce_blocks(out: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """The same for large 1-D tensors, block by block if it writes intermediate results."""
    step = _BLOCK_NBYTES // out.itemsize
    if len(parts) <= 2 or out.numel() <= step:
        reduce_into(out, parts, op)
        return
    for pieces in zip(out.split(step), *(part.split(step) for part in parts), strict=True):
        reduce_into(pieces[0], pieces[1:], op)


def _reduce_wide(out: Tensor, parts: Sequence[Tensor], pairwise: Callable[..., Tensor]) -> None:
    wide = torch.float32 if out.is_floating_point() else torch.int64
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = pairwise(total, part.to(wide))
    out.copy_(total)
