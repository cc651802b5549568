"""Kernels of autocast on a CPU, for a while."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def autocast_on_cpu(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, calls of `aten`'s ops of these names under autocast on a CPU, in any thread, go to `kernels`.

    Why: the lists of a GPU, on tensors of a CPU. Public: `torch.library.Library`, which stays for good.
    """
    library: Any = torch.library
    with library._scoped_library("aten", "IMPL") as scope:
        for name, kernel in kernels.items():
            scope.impl(name, kernel, "AutocastCPU")
        yield
