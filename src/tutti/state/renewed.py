"""Redirects the user's references to a replaced parameter to the shard in its place.

Otherwise a list of `model.parameters()` from before the first step would hold weights that no step changes,
and keep their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tutti.torch_private.pytrees import tree_map


class _Renewed(Tensor):
    """Forwards every operation to the tensor in its place."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, options = tree_map(now_of, (args, kwargs or {}))
        return func(*given, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(now_of(self), name)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(now_of(self))


class RenewedParameter(_Renewed, nn.Parameter):
    """A replaced parameter."""


class RenewedTensor(_Renewed):
    """A replaced buffer or optimizer slot."""


_CLASSES: dict[type, type] = {nn.Parameter: RenewedParameter, Tensor: RenewedTensor}


def renew(old: Any, now: Callable[[], Tensor]) -> None:
    """Redirect `old` to the tensor that `now` returns, and free its own memory."""
    if type(old) not in _CLASSES:
        return
    old.data = torch.empty(0, dtype=old.dtype, device=old.device)
    old.__class__ = _CLASSES[type(old)]
    object.__setattr__(old, "now", now)


def now_of(x: Any) -> Any:
    """The tensor in the place of a renewed one; anything else unchanged."""
    return x.__dict__["now"]() if isinstance(x, _Renewed) else x
