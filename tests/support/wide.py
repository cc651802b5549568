"""A program in float64 throughout, so that what is left of a difference is a mistake, not rounding.

In float32 two right runs drift apart: rounding flips a ReLU, and a few steps later the losses differ by 1e-3.
Which steps do depends on the processor's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Wide(TorchFunctionMode):
    """Inside, what asks for float32 gets float64: models cast so in norms, rotary tables and losses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func` with each dtype that is float32 widened."""
        if func is Tensor.float:
            func = Tensor.double
        args = [_widened(x) for x in args]
        return func(*args, **{k: _widened(x) for k, x in (kwargs or {}).items()})


def _widened(x: Any) -> Any:
    return _WIDE.get(x, x) if isinstance(x, torch.dtype) else x


def widened(model: nn.Module, *batches: Any) -> tuple[Any, ...]:
    """`batches` in float64; the model becomes so where it is."""
    model.double()
    return tuple(
        tuple(x.double() if x.is_floating_point() else x for x in batch) for batch in batches
    )


def wide_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` as it is in float64."""

    @functools.wraps(step)
    def played(*args: Any) -> Any:
        with Wide():
            return step(*args)

    return played
