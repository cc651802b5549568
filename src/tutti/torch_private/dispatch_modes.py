"""Modes and subclasses in PyTorch's dispatch: `torch.utils._python_dispatch`, and switches of `torch._C`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode", "no_modes", "no_torch_function", "not_overridden"]

# `TorchDispatchMode`: sees each op that runs inside. Why: what a step overwrites, and its random numbers.
# Public: none.

# `with no_modes():` ops run as if no mode was on. Why: a trace needs real values now and then. Public: none.
no_modes: Any = _disable_current_modes

# `with no_torch_function():` neither modes nor subclasses see a call. Why: tutti looks at gradients of the
# step's tensors, and to a mode it would be the step that reads. Public: none.
no_torch_function: Any = torch._C.DisableTorchFunction

# As `__torch_function__` of a subclass: functions are not overridden, only ops are. Why: shards answer ops.
# Public: none.
not_overridden: Any = torch._C._disabled_torch_function_impl
