"""The handler by which PyTorch's `DataLoader` learns that a worker has died."""

from __future__ import annotations

from typing import Any

from torch.utils.data._utils import signal_handling


def is_of_data_loader(handler: Any) -> bool:
    """Whether a handler of SIGCHLD is that of PyTorch's `DataLoader`.

    Why: it raises an error at any line of the program. Public: none.
    """
    return getattr(handler, "__module__", None) == signal_handling.__name__
