"""PyTorch's own reads of values, which a trace does not have: owners and names, to patch."""

from typing import Any

import torch
from torch.distributions import Distribution
from torch.nn.modules import transformer

# Whether a new `torch.distributions.Distribution` checks the values of its arguments.
# Why: a trace has none. Public: `Distribution.set_default_validate_args`, which cannot be undone.
CHECK_OF_ARGUMENTS: tuple[Any, str] = (Distribution, "_validate_args")

# The function `(mask, is_causal, size)` by which `nn.Transformer` tests whether a mask is causal.
# Why: it compares values. Public: an option of `nn.Transformer`.
CHECK_OF_CAUSAL_MASKS: tuple[Any, str] = (transformer, "_detect_is_causal_mask")

# The function of `torch` that reads all values of a tensor.
# Why: a trace has no values. Public: none.
CHECK_OF_VALUES: tuple[Any, str] = (torch, "_check_tensor_all_with")
