"""The gradients of several workers for one block, added up in their order."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.server.protocol.keys import VariableBlock
from tutti.server.protocol.messages import TensorPart


def by_row(x: Tensor, block: VariableBlock) -> bool:
    """Whether a tensor of a block's state has a row for each row of the block."""
    return tuple(x.shape) == block.shape


def summed(parts: list[TensorPart], block: VariableBlock, scale: float) -> Tensor:
    """The sum of dense parts and of rows, as a dense gradient; a single part is not copied."""
    dtype = block.variable.dtype
    if len(parts) == 1 and parts[0].rows is None:
        only = parts[0].plain(dtype)
        return only if scale == 1.0 else only * scale
    total = torch.zeros(block.shape, dtype=dtype)
    for number, part in enumerate(parts):
        if part.rows is not None:
            total.index_add_(0, part.rows, part.plain(dtype))
        elif number:
            total += part.plain(dtype)
        else:
            total.copy_(part.plain(dtype))
    return total if scale == 1.0 else total.mul_(scale)


def summed_rows(
    parts: list[TensorPart], block: VariableBlock, scale: float
) -> tuple[Tensor, Tensor]:
    """The rows of all parts, ascending, and the sum for each."""
    found = [p.rows for p in parts if p.rows is not None]
    rows = torch.cat(found).unique()
    total = torch.zeros((len(rows), *block.shape[1:]), dtype=block.variable.dtype)
    for part, own in zip(parts, found, strict=True):
        total.index_add_(0, torch.searchsorted(rows, own), part.plain(total.dtype))
    return rows, total if scale == 1.0 else total.mul_(scale)
