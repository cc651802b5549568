"""Ids of rows, as ops that check them: an id outside of its table is an error, as of PyTorch's own lookups.

    tutti::from_start(ids, size, from_end) -> ids, int64; with `from_end` negative ones count from the end
    tutti::near(rows, ids, size, ignored) -> the position of each id in `rows`, which ascend

`near` gives any position for an id that is not in `rows`. It does not check ids that equal `ignored`, and
none without a `size`. On a processor the error is an `IndexError`. On a GPU, as in eager PyTorch, an assert
on the device ends the process: the check is one small kernel and waits for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("tutti", "FRAGMENT")
_LIBRARY.define("from_start(Tensor ids, int size, bool from_end) -> Tensor")
_LIBRARY.define("near(Tensor rows, Tensor ids, int? size, int? ignored) -> Tensor")


def _from_start(ids: Tensor, size: int, from_end: bool) -> Tensor:
    _check(ids, size, -size if from_end else 0)
    ids = ids.to(torch.int64, copy=True)
    return torch.where(ids < 0, ids + size, ids) if from_end else ids


def _near(rows: Tensor, ids: Tensor, size: int | None, ignored: int | None) -> Tensor:
    ids = ids.to(torch.int64).contiguous()
    if size is not None:
        _check(ids if ignored is None else ids.masked_fill(ids == ignored, 0), size)
    return torch.searchsorted(rows, ids).clamp_max_(len(rows) - 1)


def _check(ids: Tensor, size: int, first: int = 0) -> None:
    if not ids.numel():
        return
    if ids.device.type != "cpu":
        # a lookup in a row without memory: its kernel asserts the range
        places = ids.flatten() - first if first else ids.flatten()
        ids.new_zeros(()).expand(size - first).index_select(0, places)
        return
    low, high = (int(x) for x in ids.aminmax())
    if low < first or high >= size:
        wrong = low if low < first else high
        raise IndexError(f"index {wrong} is out of bounds for a dim of size {size}")


def _fake_from_start(ids: Tensor, size: int, from_end: bool) -> Tensor:
    return torch.empty_like(ids, dtype=torch.int64)


def _fake_near(rows: Tensor, ids: Tensor, size: int | None, ignored: int | None) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.int64)


_LIBRARY.impl("from_start", _from_start, "CompositeExplicitAutograd")
_LIBRARY.impl("near", _near, "CompositeExplicitAutograd")
torch.library.register_fake("tutti::from_start", _fake_from_start, lib=_LIBRARY)
torch.library.register_fake("tutti::near", _fake_near, lib=_LIBRARY)

from_start = torch.ops.tutti.from_start.default
near = torch.ops.tutti.near.default
