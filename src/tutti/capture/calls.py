"""Functions of PyTorch that a step calls, in a form of the same values and gradients that can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OtherForms(TorchFunctionMode):
    """Calls of what is in `FORMS` take that form, where it has one for their arguments."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in FORMS:
            result = FORMS[func](*args, **given)
            if result is not NotImplemented:
                return result
        return func(*args, **given)


def _write(x: Any, key: Any, value: Any) -> Any:
    """`x[mask] = value`, the same value at each place.

    PyTorch would pick the gradient of the value by the mask, and its shape would depend on values.
    """
    found = _mask_in(key, x)
    if found is None or not _suits(x, value):
        return NotImplemented
    mask, before = found
    behind = x.dim() - before - mask.dim()
    places = mask.reshape(*mask.shape, *[1] * behind)
    if not isinstance(value, Tensor):
        x.masked_fill_(places, value)
        return None
    if value.dim() > behind:
        at = value.dim() - behind - 1  # the dim of the places that the mask picks
        if value.shape[at] != 1:
            return NotImplemented
        value = value.reshape(*value.shape[:at], *[1] * mask.dim(), *value.shape[at + 1 :])
    x.copy_(torch.where(places, value.to(x.dtype), x))
    return None


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


def _gaussian_nll_loss(*args: Any, **kwargs: Any) -> Any:
    """Without the look whether a variance is negative."""
    with mock.patch.object(torch, "any", return_value=False):
        return F.gaussian_nll_loss(*args, **kwargs)


FORMS: dict[Any, Callable[..., Any]] = {
    Tensor.__setitem__: _write,
    F.gaussian_nll_loss: _gaussian_nll_loss,
}
