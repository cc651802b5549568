"""`bincount` with a known number of counts, as an op.

    tutti::bincount(x, weights, num) -> counts

The size of PyTorch's result depends on the largest value. Here it is `num`, and a value that is not below it
is an error of the call. The values may be split: each rank counts its own, and a reduction adds the counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("tutti", "FRAGMENT")
_LIBRARY.define("bincount(Tensor x, Tensor? weights, int num) -> Tensor")


def _bincount(x: Tensor, weights: Tensor | None, num: int) -> Tensor:
    counts = torch.bincount(x, weights, num)
    if len(counts) > num:
        raise IndexError(
            f"torch.bincount(x, minlength={num}) of a value of {len(counts) - 1}: a captured step has {num} "
            f"counts at every call; give a minlength above each value"
        )
    return counts


def _fake_bincount(x: Tensor, weights: Tensor | None, num: int) -> Tensor:
    if weights is None:
        return x.new_empty(num, dtype=torch.int64)
    single = weights.dtype == torch.float32
    return x.new_empty(num, dtype=torch.float32 if single else torch.float64)


_LIBRARY.impl("bincount", _bincount, "CompositeExplicitAutograd")
torch.library.register_fake("tutti::bincount", _fake_bincount, lib=_LIBRARY)

bincount = torch.ops.tutti.bincount.default
