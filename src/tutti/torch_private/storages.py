"""The memory of a tensor, and the number of its users."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, UntypedStorage

_BINDINGS: Any = torch._C


def storage_id(storage: UntypedStorage) -> int:
    """A number for a live storage: equal for two views of the same memory, of fakes too.

    Why: aliasing. Public: `data_ptr()`, which is 0 for each fake and each empty tensor.
    """
    return storage._cdata


def memory_id(x: Tensor) -> int:
    """The `storage_id` of a tensor's storage."""
    return x.untyped_storage()._cdata


def num_uses(storage: UntypedStorage) -> int:
    """The number of tensors and Python objects that hold a storage, this one included.

    Why: a warning if another tensor shares a weight's memory. Public: none.
    """
    return _BINDINGS._storage_Use_Count(storage._cdata)
