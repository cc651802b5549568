"""The chunks into which a step cuts its batch: `for part in x.chunk(2)`, gradients accumulated by hand.

Ranks and micro-batches take rows of each chunk, so they must divide these.
"""

from __future__ import annotations

import torch
from torch import fx

from tutti.capture.captured import Captured
from tutti.propagate.batch_dim import Dims

aten = torch.ops.aten


def rows_of_chunks(captured: Captured, dims: Dims) -> list[int]:
    """The numbers of rows of such chunks, for the tensors of the batch with samples."""
    found: list[int] = []
    for name, dim in dims.items():
        if dim is not None:
            found += _rows(captured.placeholder(name), dim)
    return found


def _rows(node: fx.Node, dim: int) -> list[int]:
    """The sizes of the slices of a tensor along its samples; none if they are not all of them, one by one."""
    parts = {_bounds(u, dim) for u in node.users if u.target is aten.slice.Tensor} - {None}
    at, sizes = 0, []
    for start, end in sorted(part for part in parts if part is not None):
        if start != at:
            return []
        sizes.append(end - start)
        at = end
    return sizes if at == node.meta["val"].shape[dim] else []


def _bounds(node: fx.Node, dim: int) -> tuple[int, int] | None:
    """The first row of a slice and the one behind its last; None for another dim or a step."""
    _, along, start, *_ = (*node.args, 0, 0)
    is_plain = along == dim and len(node.args) < 5 and isinstance(start, int) and start >= 0
    return (start, start + int(node.meta["val"].shape[dim])) if is_plain else None
