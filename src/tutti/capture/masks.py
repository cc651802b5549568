"""`x[mask] = value` as a choice for each element: above autograd, which then knows a gradient of fixed shape.

PyTorch picks the gradient of the value by the mask, and how many elements that has depends on values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PLAIN: Any = Tensor.__setitem__


def write(x: Any, key: Any, value: Any) -> None:
    """`x[key] = value`; what is no mask, or takes another value at each place, is left to PyTorch."""
    if not _written(x, key, value):
        _PLAIN(x, key, value)


def _written(x: Any, key: Any, value: Any) -> bool:
    """Write one value at each place of a mask; whether that is what was asked for."""
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
        at = value.dim() - behind - 1  # the dim of the places that the mask picks
        if value.shape[at] != 1:
            return False
        value = value.reshape(*value.shape[:at], *[1] * mask.dim(), *value.shape[at + 1 :])
    x.copy_(torch.where(places, value.to(x.dtype), x))
    return True


def _suits(x: Tensor, value: Any) -> bool:
    """Whether a value is a tensor or a number that a tensor can be filled with as it is."""
    return isinstance(value, Tensor) or (type(value) is float and x.is_floating_point())


def _mask_in(key: Any, x: Tensor) -> tuple[Tensor, int] | None:
    """The one mask in a key of whole slices, and how many dims of x stand before it."""
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
