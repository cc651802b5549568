"""Tensors without values: `torch._subclasses`.

Why: traces and plans need neither the memory nor the time of real tensors.
Public: none; `torch.device("meta")` keeps neither the device nor refuses a read value.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from tutti.torch_private.op_tables import has_kernel
from tutti.torch_private.quick_fakes import quick_fake

__all__ = [
    "LOG",
    "DataDependentOutputException",  # an op that gives a value to Python; public: none
    "DynamicOutputShapeException",  # an op whose shape depends on values; public: none
    "FakeTensor",
    "FakeTensorMode",
    "SizedFakeMode",
    "empty_fake",
    "fake_in",
    "new_memory",
    "under_modes",
]

# The logger of fakes. Why: it repeats each error of a trace, beside the report. Public: none.
LOG = logging.getLogger("torch._subclasses.fake_tensor")


def new_memory(nbytes: int) -> UntypedStorage:
    """Memory for fakes of its own."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def fake_in(
    mode: FakeTensorMode,
    memory: UntypedStorage,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A fake that lies in the memory of another one, or in new memory.

    Why: a call under the mode takes five times as long. Public: none.
    """
    values = torch.empty(0, dtype=dtype, device="meta").set_(memory, offset, shape, stride)
    return quick_fake(mode, values, device)


def empty_fake(
    mode: FakeTensorMode, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A contiguous fake in new memory; see `fake_in`."""
    if under_modes() or not all(type(n) is int for n in shape):
        with mode:
            return torch.empty(shape, dtype=dtype, device=device)
    return quick_fake(mode, torch.empty(shape, dtype=dtype, device="meta"), device)


def under_modes() -> bool:
    """Whether a mode sees every call of an op: under one, `fake_in` has no memory to give.

    Why: its memory is made by calls. Public: none.
    """
    return torch._C._len_torch_dispatch_stack() > 0


class SizedFakeMode(FakeTensorMode):
    """Fakes whose sizes may be symbols.

    For an op without code of its own for fakes, the mode's kernel reads sizes as integers, which makes
    constants of them. This class uses PyTorch's Python code of such an op instead.

    Why: `_dispatch_impl` is the mode's evaluation of an op. Public: none.
    """

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not _is_composite(func):
            return super()._dispatch_impl(func, types, args, kwargs)
        guard = torch._C._EnablePythonDispatcher()
        try:
            return super()._dispatch_impl(func, types, args, kwargs)
        finally:
            del guard


def _is_composite(func: Any) -> bool:
    name = func.name()
    return has_kernel(name, "CompositeExplicitAutograd") and not has_kernel(name, "Meta")
