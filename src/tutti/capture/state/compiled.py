"""What `torch.compile` has wrapped is traced, and compared, as the plain code inside: nothing is compiled.

A wrapped function refuses to run inside a trace, and a wrapped module has names of its own. The step is one
graph anyway, so there is nothing left for a compiler of parts of it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch.compiler import set_stance

from tutti.torch_private.compiled_code import nested_traces_allowed


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Inside, compiled functions, methods and modules run as they were before."""
    if torch.compiler.is_compiling():
        yield
        return
    with (
        nested_traces_allowed(),
        set_stance("force_eager"),
        warnings.catch_warnings(),
    ):
        # It has seen that the hooks of the watch would run once more for a wrapper.
        warnings.filterwarnings(
            "ignore", message="Using `torch.compile\\(module\\)` when there are"
        )
        yield
