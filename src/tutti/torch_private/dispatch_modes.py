"""Modes and subclasses in PyTorch's dispatch: `torch.utils._python_dispatch`, and switches of `torch._C`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "TorchDispatchMode",
    "no_modes",
    "no_torch_function",
    "not_overridden",
    "num_function_modes",
]

# `TorchDispatchMode`: sees each op that runs inside. Why: to find a step's overwritten tensors and its random
# numbers. Public: none.

# `with no_modes():` ops run without modes. Why: a trace sometimes needs real values. Public: none.
no_modes: Any = _disable_current_modes

# `with no_torch_function():` neither modes nor subclasses see a call. Why: tutti reads gradients of the
# step's tensors, which a mode would take for a read by the step. Public: none.
no_torch_function: Any = torch._C.DisableTorchFunction

# As `__torch_function__` of a subclass: it overrides ops, not functions. Why: shards answer ops.
# Public: none.
not_overridden: Any = torch._C._disabled_torch_function_impl

# `num_function_modes()`: how many modes see calls of functions, such as a default device. Why: each call of a
# step asks, and the public way takes microseconds. Public: `torch.get_default_device`.
num_function_modes: Any = torch._C._len_torch_function_stack
