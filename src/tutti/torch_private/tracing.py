"""Tracing to an `fx` graph: `torch.fx.experimental.proxy_tensor`, which PyTorch may change at any release."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)

__all__ = [
    "METADATA_OF_NODES",
    "PythonKeyTracer",  # whose nodes get their line and region; public: a hook for new nodes
    "functorch_on",
    "get_proxy_mode",  # the current trace; public: none
    "get_proxy_slot",  # the node of a traced value; public: none
    "plain_of_functional",
    "trace",
    "track_tensor_tree",  # registers a value as a node's with the trace; public: none
    "without_code",
    "wrapped_functional",
]

_torch: Any = torch
_FUNCTORCH = (
    _torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    _torch._C.DispatchKey.FuncTorchDynamicLayerBackMode,
)


def trace(
    function: Callable[..., Any], inputs: Sequence[Any], table: Mapping[Any, Any] | None = None
) -> fx.GraphModule:
    """`function(*inputs)` as a graph, without the names of the functions called (`torch_fn`).

    Args:
        table: other forms of ops, as the decompositions of `make_fx`.

    Why: a step as one graph; a mode that only notes names sees each call and property of a tensor.
    Public: none, `torch.export` has no backward.
    """
    made = make_fx(function, table, tracing_mode="real", _disable_torch_fn_metadata_mode=True)  # type: ignore[arg-type]
    with functorch_on():
        return made(*inputs)


@contextlib.contextmanager
def functorch_on() -> Iterator[None]:
    """Context in which the transforms of `torch.func` see each op.

    Why: `Tensor.__repr__` turns them off until a variable of it dies, which a thread may keep alive that
    samples stacks: `functionalize` would lose writes into new tensors. Public: none.
    """
    excluded, exclude = (
        torch._C._dispatch_tls_is_dispatch_key_excluded,
        torch._C._dispatch_tls_set_dispatch_key_excluded,
    )
    off = [key for key in _FUNCTORCH if excluded(key)]
    for key in off:
        exclude(key, False)
    try:
        yield
    finally:
        for key in off:
            exclude(key, True)


def without_code() -> Any:
    """A block in which a `GraphModule` makes no code before its first call.

    Why: tutti uses only the graph of a trace. Public: none.
    """
    return _use_lazy_graph_module(True)


# The function that describes a traced value a second time, as `meta["tensor_meta"]` beside `meta["val"]`: its
# module and its name, to patch.
# Why: time. Public: an option of `make_fx`.
METADATA_OF_NODES: tuple[Any, str] = (proxy_tensor, "_extract_tensor_metadata")


def plain_of_functional(x: Tensor) -> Tensor:
    """The tensor inside of a functional tensor (`torch.func.functionalize`), after all writes; else `x`.

    Why: the second trace mixes copied nodes with replayed ones. Public: none.
    """
    if not _torch._is_functional_tensor(x):
        return x
    _torch._sync(x)
    return _torch._from_functional_tensor(x)


def wrapped_functional(x: Tensor) -> Tensor:
    """A tensor as a functional tensor of the current `torch.func.functionalize`.

    Why: as `plain_of_functional`. Public: none.
    """
    functorch = _torch._C._functorch
    return functorch._wrap_functional_tensor(x, functorch.maybe_current_level())
