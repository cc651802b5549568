"""The wrappers of `torch.compile` around functions and modules: `torch._dynamo`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo import config
from torch._dynamo.eval_frame import OptimizedModule

__all__ = ["OptimizedModule", "nested_traces_allowed", "plain", "plain_module"]

# `OptimizedModule`: a compiled module. Why: a trace runs the module inside. Public: none.


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's own function inside the wrappers of `torch.compile`.

    Why: a compiled function refuses to run inside a trace. Public: none.
    """
    while inner := getattr(function, "_torchdynamo_orig_callable", None):
        function = inner
    return function


def plain_module(module: OptimizedModule) -> nn.Module:
    """The user's own module inside of a compiled one.

    Why: names of state are those of the module inside. Public: none.
    """
    return module._orig_mod


def nested_traces_allowed() -> Any:
    """A block in which compiled code that runs inside of a trace raises no error.

    Why: inside of `torch.compiler.set_stance("force_eager")` it is plain code. Public: none.
    """
    return config.patch(error_on_nested_fx_trace=False)
