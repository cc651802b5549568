"""A parameter that shards have replaced, where the user still holds it: it stands for the one in its place.

A list of `model.parameters()` from before the first step would otherwise hold weights that no step changes,
and keep their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tutti.torch_private.pytrees import tree_map


class _Renewed(Tensor):
    """What is done with it is done with the tensor in its place."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, options = tree_map(now_of, (args, kwargs or {}))
        return func(*given, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(now_of(self), name)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(now_of(self))


class RenewedParameter(_Renewed, nn.Parameter):
    """A parameter of the user's."""


class RenewedTensor(_Renewed):
    """A buffer, or an optimizer's slot."""


_CLASSES: dict[type, type] = {nn.Parameter: RenewedParameter, Tensor: RenewedTensor}


def renew(old: Any, now: Callable[[], Tensor]) -> None:
    """Let `old` stand for the tensor that `now` gives, and let go of its own memory."""
    if type(old) not in _CLASSES:
        return
    old.data = torch.empty(0, dtype=old.dtype, device=old.device)
    old.__class__ = _CLASSES[type(old)]
    object.__setattr__(old, "now", now)


def now_of(x: Any) -> Any:
    """The tensor in the place of one that was renewed; anything else as it is."""
    return x.__dict__["now"]() if isinstance(x, _Renewed) else x
