"""PyTorch's table of ops: overloads, their schemas, their kernels, and the fastest call of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverload

# Why: the type of the targets of a traced graph. Public: none.
__all__ = [
    "NN_BINDINGS",
    "OpOverload",
    "all_op_names",
    "boxed_call",
    "has_kernel",
    "overload_name",
    "python_call",
    "schema_of",
]

# `schema_of(op)`: names and types of its arguments, and those that it writes or views.
# Why: aliasing decides what may be copied, split, or overwritten. Public: none.
schema_of: Callable[[Any], Any] = attrgetter("_schema")

# `overload_name(op)`: "Tensor" of `aten.add.Tensor`, and "default" for a schema without a name.
# Why: to find the same overload of another op. Public: none.
overload_name: Callable[[Any], str] = attrgetter("_overloadname")

# `python_call(op)`: the function that `op(...)` calls after its own lookups.
# Why: generated code calls ops at each step. Public: none.
python_call: Callable[[Any], Callable[..., Any]] = attrgetter("_op")

# The C++ bindings of functions that `torch.nn.functional` wraps in Python.
# Why: generated code calls them at each step. Public: `torch.nn.functional`, but slower.
NN_BINDINGS: Any = torch._C._nn  # type: ignore[attr-defined]

_BINDINGS: Any = torch._C


def all_op_names() -> list[str]:
    """The full names of all registered ops, as "aten::add.Tensor".

    Why: `dir(torch.ops.aten)` lists only ops already used. Public: none.
    """
    return _BINDINGS._dispatch_get_all_op_names()


def has_kernel(name: str, key: str) -> bool:
    """Whether op `name` has a kernel of its own at a dispatch key, as "CPU".

    Why: fused updates and fakes ask before they choose an op. Public: none.
    """
    return _BINDINGS._dispatch_has_kernel_for_dispatch_key(name, key)


def boxed_call(op: OpOverload) -> tuple[Any, ...]:
    """The callable for an op, and the arguments before the op's own.

    Why: the dispatcher's own call reads arguments in half the time of the overload. Public: the overload
    itself, also the fallback for a PyTorch without the private call.
    """
    if not hasattr(_BINDINGS, "_dispatch_call_boxed"):
        return (python_call(op),)
    return _BINDINGS._dispatch_call_boxed, _handle(op)


@cache
def _handle(op: OpOverload) -> Any:
    schema = schema_of(op)
    return _BINDINGS._dispatch_find_schema_or_throw(schema.name, schema.overload_name)
