"""Writes by a mask as a choice for each element, above autograd, so that gradients have fixed shapes.

In `x[mask] = value` PyTorch picks the gradient of the value by the mask, and its number of elements depends
on values. `x.masked_scatter(mask, source)` takes elements from its source in order; if its mask picks whole
rows (images among tokens), a row's number is a running count of the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PLAIN: Any = Tensor.__setitem__
_PLAIN_SCATTER: Any = Tensor.masked_scatter


def write(x: Any, key: Any, value: Any) -> None:
    """`x[key] = value`; PyTorch handles other keys, and a separate value for each position."""
    if not _written(x, key, value):
        _PLAIN(x, key, value)


def _written(x: Any, key: Any, value: Any) -> bool:
    """Write one value at each position of a mask; False, without a write, for any other assignment."""
    found = _mask_in(key, x)
    if found is None or not _suits(x, value):
        return False
    mask, before = found
    behind = x.dim() - before - mask.dim()
    places = mask.reshape(*mask.shape, *[1] * behind)
    if not isinstance(value, Tensor):
        x.masked_fill_(places, value)
        return True
    if value.dim() > behind:
        at = value.dim() - behind - 1  # the dim of the positions that the mask picks
        if value.shape[at] != 1:
            return False
        value = value.reshape(*value.shape[:at], *[1] * mask.dim(), *value.shape[at + 1 :])
    x.copy_(torch.where(places, value.to(x.dtype), x))
    return True


def _suits(x: Tensor, value: Any) -> bool:
    """Whether a value is a tensor, or a number, that can fill a tensor without a cast."""
    return isinstance(value, Tensor) or (type(value) is float and x.is_floating_point())


def _mask_in(key: Any, x: Tensor) -> tuple[Tensor, int] | None:
    """The only mask in a key of whole slices, and the number of dims of x before it."""
    keys = key if isinstance(key, tuple) else (key,)
    masks = [i for i, k in enumerate(keys) if isinstance(k, Tensor) and k.dtype == torch.bool]
    if len(masks) != 1:
        return None
    mask = keys[masks[0]]
    others = [k for i, k in enumerate(keys) if i != masks[0]]
    if any(not (isinstance(k, slice) and k == slice(None)) for k in others):
        return None
    before = masks[0]
    fits = mask.dim() > 0 and mask.shape == x.shape[before : before + mask.dim()]
    return (mask, before) if fits else None


def scattered(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`x.masked_scatter(mask, source)`; PyTorch handles a mask that picks parts of rows."""
    width = _row_dims(x, mask)
    lead, each = x.shape[: x.dim() - width], x.shape[x.dim() - width :].numel()
    if not width or not x.numel() or source.numel() < each:
        return _PLAIN_SCATTER(x, mask, source)
    places = mask[(..., *[0] * width)].expand(lead)
    number = (places.reshape(-1).cumsum(0) - 1).reshape(lead)
    rows = source.reshape(-1)[: source.numel() // each * each].reshape(-1, each)
    # a row too few is an index beyond the source, which raises
    taken = torch.embedding(rows, torch.where(places, number, 0)).reshape(x.shape)
    return torch.where(places.reshape(*lead, *[1] * width), taken, x)


def _row_dims(x: Tensor, mask: Tensor) -> int:
    """The number of last dims of x along which a mask is constant."""
    dims = 0
    for d in range(1, min(x.dim(), mask.dim()) + 1):
        if mask.shape[-d] != 1 and mask.stride(-d) != 0:
            break
        dims += 1
    return dims
