"""Runs the plain code inside of `torch.compile`'s wrappers, traced and eager: it compiles nothing.

A wrapped function refuses to run inside a trace, and a wrapped module has names of its own. The step is one
graph anyway, so a compiler of its parts has no use.
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
    """Inside, compiled functions, methods and modules run their plain code."""
    if torch.compiler.is_compiling():
        yield
        return
    with (
        nested_traces_allowed(),
        set_stance("force_eager"),
        warnings.catch_warnings(),
    ):
        # The wrapper would run the hooks of the watch a second time.
        warnings.filterwarnings(
            "ignore", message="Using `torch.compile\\(module\\)` when there are"
        )
        yield
