"""A faster record of an op in a trace, and a read value as a node whatever tensor it is of.

Why: most ops of a step take tensors of the trace and plain constants, and give one tensor. For these the
record of `make_fx` flattens and rebuilds the arguments twice, and asks each of them what else it might be.
It evaluates a read of a fake that no node has given as one of a constant: its symbol has no node.
Public: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer

from tutti.torch_private.quick_fakes import CONSTANTS

__all__ = ["RECORD_OF_OPS", "recorded"]

_proxies: Any = proxy_tensor
_C: Any = torch._C
_PLAIN = "_plain_ops"
# Their records are constants of the trace, or ask for values.
_OTHERS = frozenset(
    (
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.lift_fresh_copy.default,
        torch.ops.aten.is_nonzero.default,
    )
)

# The function that records an op, and gives its result: its module and its name, to patch by `recorded`.
RECORD_OF_OPS: tuple[Any, str] = (proxy_tensor, "proxy_call")
_plain_record: Any = _proxies.proxy_call


class _NotPlain(Exception):
    """An argument that is neither a tensor of the trace nor a plain constant."""


def recorded(
    mode: Any, func: Any, pre_dispatch: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The same as the function of `RECORD_OF_OPS`; it also records a read of a fake that no node gives."""
    if (name := _name(mode, func)) is None:
        if _asks(func):
            _make_nodes((*args, *kwargs.values()), mode.tracer)
        return _plain_record(mode, func, pre_dispatch, args, kwargs)
    tracer = mode.tracer
    try:
        given = tuple([_node(x, tracer) for x in args])
        named = {key: _node(x, tracer) for key, x in kwargs.items()}
    except _NotPlain:
        return _plain_record(mode, func, pre_dispatch, args, kwargs)
    node = tracer.create_node("call_function", func, given, named, name)
    before, tracer.enable_thunkify = tracer.enable_thunkify, True
    try:
        result = func(*args, **kwargs)
    finally:
        tracer.enable_thunkify = before
    proxy = fx.Proxy(node, tracer)
    is_plain = type(result) is FakeTensor and result.layout is torch.strided
    if not is_plain or result._has_symbolic_sizes_strides:
        return _proxies.track_tensor_tree(result, proxy, constant=None, tracer=tracer)
    _proxies._set_unbacked_bindings(result, proxy)
    _proxies.set_proxy_slot(result, tracer, _proxies._ProxyTensor(proxy, None))
    node.meta["val"] = _proxies.snapshot_fake(result)
    node.meta["tensor_meta"] = _proxies._extract_tensor_metadata(result)
    return result


def _name(mode: Any, func: Any) -> str | None:
    """The name of the nodes of an op that a trace records as it is; None for another one."""
    known, table = vars(mode).setdefault(_PLAIN, {}), _table(mode)
    key = id(func), id(table)  # ops last, and their own hash is slow
    if key not in known:
        known[key] = _new_name(mode, func, table)
    return known[key]


def _table(mode: Any) -> Any:
    """The decompositions now: of the mode, or of all modes in torch 2.11."""
    if hasattr(mode, "decomposition_table"):
        return mode.decomposition_table
    return _proxies.CURRENT_DECOMPOSITION_TABLE


def _new_name(mode: Any, func: Any, table: Any) -> str | None:
    if type(func) is not OpOverload or type(mode.tracer) is not PythonKeyTracer:
        return None
    if func in table or func in _OTHERS or mode.pre_dispatch:
        return None
    composite = _C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    notes_more = mode.tracer.record_stack_traces or getattr(mode, "emulate_precision_casts", False)
    if composite or _asks(func) or notes_more:
        return None
    return mode.tracer.graph._target_to_str(func.overloadpacket.__name__)


def _asks(func: Any) -> bool:
    """Whether an op gives a value of a tensor to Python."""
    return torch.Tag.data_dependent_output in func.tags


def _make_nodes(given: Sequence[Any], tracer: Any) -> None:
    """Make nodes, as of constants, of the fakes among `given` that have none."""
    for x in given:
        if type(x) is FakeTensor and x not in tracer.tensor_tracker:
            proxy = fx.Proxy(tracer.create_arg(x), tracer)
            _proxies.track_tensor_tree(x, proxy, constant=None, tracer=tracer)


def _node(x: Any, tracer: Any) -> Any:
    """An argument of the node: the node of a tensor; a constant is itself."""
    kind = type(x)
    if kind is FakeTensor:
        slot = tracer.tensor_tracker.get(x)
        if slot is None or slot.constant is not None:
            raise _NotPlain
        return slot.proxy.node
    if kind in CONSTANTS:
        return x
    if kind is list:
        return [_node(y, tracer) for y in x]
    if kind is tuple:
        return tuple([_node(y, tracer) for y in x])
    raise _NotPlain
