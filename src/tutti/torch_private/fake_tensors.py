"""Tensors without values: `torch._subclasses`.

Why: traces and plans need neither the memory nor the time of real tensors.
Public: none; `torch.device("meta")` keeps neither the device nor refuses a read value.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from tutti.torch_private.op_tables import has_kernel

__all__ = [
    "LOG",
    "DataDependentOutputException",  # an op that gives a value to Python; public: none
    "DynamicOutputShapeException",  # an op whose shape depends on values; public: none
    "FakeTensor",
    "FakeTensorMode",
    "SizedFakeMode",
]

# The logger of fakes. Why: it repeats each error of a trace, beside the report. Public: none.
LOG = logging.getLogger("torch._subclasses.fake_tensor")


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
