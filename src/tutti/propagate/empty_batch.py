"""Refuses a batch without samples.

On one device its mean loss is 0 / 0: a NaN, which the update may carry into every weight. With `micro` and
`pipe` it has nothing to split in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tutti.errors import ShardingError
from tutti.propagate.batch_dim import BatchDim, Dims, dims_of
from tutti.torch_private.pytrees import tree_leaves


def refuse_empty(
    batch: Sequence[Any], told: BatchDim, step: Callable[..., Any], *, first: int
) -> None:
    """Raise `ShardingError` for a batch of 0 samples.

    `told` gives the dims of samples; by default dim 0 of the first tensor that has dims. A batch without
    tensors passes, and so does one in which `told` gives no tensor samples.

    Args:
        batch: the arguments of the step from `first` on.
        told, step, first: as for `propagate.batch_dim.dims_of`.
    """
    tensors = [x for x in tree_leaves(tuple(batch)) if isinstance(x, Tensor)]
    for name, dim in _dims(tensors, batch, told, step, first).items():
        number = int(name.partition(".")[2])
        shape = tuple(tensors[number].shape)
        if dim is not None and shape[dim] == 0:
            raise ShardingError(
                f"the batch is empty: batch tensor {number} has 0 samples in dim {dim}",
                at=f"shape {list(shape)}",
                why="the mean over no samples is 0 / 0, and an update would carry NaN into the weights",
                fix="leave such a batch out (DataLoader(drop_last=True)); or, if this tensor holds no "
                "samples, tell by distribute(..., batch_dim=...) which dim of each argument does",
            )


def _dims(
    tensors: Sequence[Tensor],
    batch: Sequence[Any],
    told: BatchDim,
    step: Callable[..., Any],
    first: int,
) -> Dims:
    if told is not None:
        return dims_of(told, step, batch, first=first)
    leading = next((i for i, x in enumerate(tensors) if x.dim()), None)
    return {} if leading is None else {f"batch.{leading}": 0}
