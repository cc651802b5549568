"""Sums and the like of a few tensors, in one order, so that every rank gets the same bits."""

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


def reduce_into(out: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """`out` becomes `parts[0] op parts[1] op ...`; it may be one of the parts, the first or not.

    Three and more half-precision numbers are added in float32 and rounded once.
    """
    if out.dtype == torch.bool:
        out, parts, op = out.view(torch.uint8), [p.view(torch.uint8) for p in parts], BOOL_OPS[op]
    pairwise = _PAIRWISE[op]
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) == 2:
        pairwise(parts[0], parts[1], out=out)
    elif out.dtype in _HALF:
        wide = parts[0].float()
        for part in parts[1:]:
            wide = pairwise(wide, part.float())
        out.copy_(wide)
    else:
        total = pairwise(parts[0], parts[1])
        for part in parts[2:-1]:
            pairwise(total, part, out=total)
        pairwise(total, parts[-1], out=out)
