"""Tensors without values: `torch._subclasses`.

Why: a step is traced, and a program is planned, without the memory and the time of real tensors.
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

# The logger of fakes. Why: it tells each error of a trace once more, beside the report. Public: none.
LOG = logging.getLogger("torch._subclasses.fake_tensor")


class SizedFakeMode(FakeTensorMode):
    """Fakes whose sizes may be symbols.

    An op that has no code of its own for fakes is worked out by one that reads sizes as whole numbers, which
    makes constants of them: there PyTorch's Python code for it is asked.

    Why: `_dispatch_impl` is where the mode works out an op. Public: none.
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
