"""The tables of modules: parameters, buffers, children and hooks by name, the modules' own dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as nn_module

Table = dict[str, Any]

# `parameters_of(module)`, `buffers_of(module)`, `children_of(module)`: the dicts themselves, with entries of
# None. Why: each call compares their contents, and state replaces tensors in them.
# Public: `named_parameters(recurse=False)` and its like, which are slower, and omit None.
parameters_of: Callable[[nn.Module], Table] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], Table] = attrgetter("_buffers")
children_of: Callable[[nn.Module], Table] = attrgetter("_modules")

_MODULE_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
# What PyTorch keeps among the attributes of a parameter that is of a subclass of `Tensor`.
# Why: the others are the user's. Public: none.
OF_TENSORS = frozenset({"_is_param"})


def count_as_parameter(x: Tensor) -> None:
    """Let `isinstance(x, nn.Parameter)` hold for a tensor of a subclass.

    Why: a fake stands in for a parameter. Public: `nn.Parameter(x)`, another object.
    """
    x._is_param = True  # type: ignore[attr-defined]


# The attributes of a tensor with its hooks. Why: as `hooks_of_tensor`. Public: none.
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _MODULE_HOOKS)


def hooks_of_module(module: nn.Module) -> Iterator[Table]:
    """The four tables of a module's hooks on its forward and its backward.

    Why: a hook added after a trace requires another trace. Public: none.
    """
    return (getattr(module, name) for name in _MODULE_HOOKS)


def hooks_of_all_modules() -> Iterator[Table]:
    """The four tables of the hooks that run for every module.

    Why: as `hooks_of_module`. Public: none.
    """
    return (getattr(nn_module, name) for name in _GLOBAL_HOOKS)


def hooks_of_tensor(x: Tensor) -> tuple[Table | None, Table | None]:
    """The tables of hooks on a tensor's gradient: before it is accumulated, and after; None without any.

    Why: as `hooks_of_module`; and stand-ins of a trace need them. Public: none.
    """
    on, after = (getattr(x, name, None) for name in TENSOR_HOOKS)
    return on, after


def share_tensor_hooks(old: Any, new: Any) -> None:
    """Give a tensor's gradient hooks to its replacement; their handles still remove them.

    Why: state replaces tensors. Public: none.
    """
    for table in TENSOR_HOOKS:
        if getattr(old, table):
            setattr(new, table, getattr(old, table))


# Attributes of an LSTM, GRU or RNN: its weights in a list, and references to them.
# Why: another list of the same weights is no other state. Public: none.
FLAT_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})


def renew_flat_weights(module: nn.Module) -> None:
    """Let an LSTM, GRU or RNN read the current parameters of its table; no effect on other modules.

    Why: it keeps a list of its weights beside the table. Public: none.
    """
    if names := getattr(module, "_flat_weights_names", None):
        module._flat_weights = [getattr(module, n, None) for n in names]  # type: ignore[assignment]
