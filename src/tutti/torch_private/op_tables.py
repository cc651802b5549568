"""PyTorch's table of ops: overloads, their schemas, their kernels, and the shortest way to call one."""

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

# `schema_of(op)`: names and types of its arguments, and which of them it writes or gives views of.
# Why: aliasing decides what may be copied, split, or overwritten. Public: none.
schema_of: Callable[[Any], Any] = attrgetter("_schema")

# `overload_name(op)`: "Tensor" of `aten.add.Tensor`, and "default" where the schema has no name.
# Why: to find the same overload of another op. Public: none.
overload_name: Callable[[Any], str] = attrgetter("_overloadname")

# `python_call(op)`: what `op(...)` calls after its own lookups.
# Why: generated code calls ops at each step. Public: none.
python_call: Callable[[Any], Callable[..., Any]] = attrgetter("_op")

# Functions of `torch.nn` as bound in C++, for which `torch.nn.functional` has Python around.
# Why: generated code calls them at each step. Public: `torch.nn.functional`, but slower.
NN_BINDINGS: Any = torch._C._nn  # type: ignore[attr-defined]

_BINDINGS: Any = torch._C


def all_op_names() -> list[str]:
    """The full names of all registered ops, as "aten::add.Tensor".

    Why: `dir(torch.ops.aten)` lists those that somebody has used already. Public: none.
    """
    return _BINDINGS._dispatch_get_all_op_names()


def has_kernel(name: str, key: str) -> bool:
    """Whether op `name` has a kernel of its own at a dispatch key, as "CPU".

    Why: fused updates and fakes ask before they choose an op. Public: none.
    """
    return _BINDINGS._dispatch_has_kernel_for_dispatch_key(name, key)


def boxed_call(op: OpOverload) -> tuple[Any, ...]:
    """What to call for an op, and the arguments that stand before the op's own.

    Why: the dispatcher's own call reads arguments in half the time that the overload takes. Public: the
    overload itself, which is also what a PyTorch without the private call gets.
    """
    if not hasattr(_BINDINGS, "_dispatch_call_boxed"):
        return (python_call(op),)
    return _BINDINGS._dispatch_call_boxed, _handle(op)


@cache
def _handle(op: OpOverload) -> Any:
    schema = schema_of(op)
    return _BINDINGS._dispatch_find_schema_or_throw(schema.name, schema.overload_name)
