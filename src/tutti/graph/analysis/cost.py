"""The predicted time of an op, from its shapes: its arithmetic, and the bytes that it reads and writes.

    seconds = flops / rate + bytes / rate of the memory + elements of an exponential / their rate

The rates are those of one thread of a server CPU, or of a data-center GPU; a tensor that fits a cache moves
faster than one that does not. To balance work only their ratio matters. All ranks must compute the same
numbers, so nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from tutti.graph.analysis.aliases import viewed
from tutti.graph.edits.edit import value_of
from tutti.graph.ops.expert_rows import PRODUCTS, expert_outer
from tutti.graph.ops.matmul import matmul
from tutti.torch_private.pytrees import tree_leaves


@dataclass(frozen=True)
class Rates:
    """Rates of a device, per second; `link` in bytes to another device.

    flops: in 16 bits. wide_flops: in float32 and float64.
    """

    flops: float
    wide_flops: float
    bytes: float
    cached_bytes: float
    exponentials: float
    link: float

    def computing(self, flops: float, dtype: torch.dtype) -> float:
        """Seconds of so many operations."""
        return flops / (self.flops if dtype.itemsize <= 2 else self.wide_flops)

    def moving(self, x: Tensor) -> float:
        """Seconds to read or write `x`."""
        return x.nbytes / (self.cached_bytes if x.nbytes <= CACHE_NBYTES else self.bytes)


RATES = {
    "cpu": Rates(9e10, 9e10, 6e9, 3e10, 1e9, 6e9),
    "cuda": Rates(3e14, 2e13, 2e12, 4e12, 1e12, 5e10),
}
CACHE_NBYTES = 2**20
# An op with one of these in its name computes an exponential or a logarithm of each element.
_EXPONENTIALS = ("softmax", "exp", "log", "gelu", "silu", "tanh", "sigmoid", "erf")
# `x @ weight.T`, which PyTorch's table lacks.
_ROWS = (torch.ops.aten.linear, matmul.overloadpacket)
# Sums over micro-batches in place: the same arithmetic as the op that returns a new value.
_IN_PLACE: dict[Any, Any] = {
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm,
}
# An op that makes a view of its operand, or runs ahead of the step.
_FREE = ("getitem", "positions")


# The kind of device that a plan is for.
_planned: ContextVar[str | None] = ContextVar("planned", default=None)


@contextmanager
def rates_for(kind: str) -> Iterator[None]:
    """Context in which ops have the rates of this kind of device, "cpu" or "cuda", not of their values'."""
    token = _planned.set(kind)
    try:
        yield
    finally:
        _planned.reset(token)


def kind_of(values: Any) -> str:
    """The kind of device, a key of `RATES`, of the first tensor in `values`, nested in any way."""
    first = next((x for x in tree_leaves(values) if isinstance(x, Tensor)), None)
    kind = _planned.get() or (first.device.type if first is not None else "cpu")
    return kind if kind in RATES else "cpu"


def rates_of(values: Any) -> Rates:
    """The rates of the device of the first tensor in `values`, nested in any way."""
    return RATES[kind_of(values)]


def seconds_of(node: fx.Node) -> float:
    """The predicted time of one node."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") in _FREE:
        return 0.0
    made = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    if not made or viewed(node) is not None:
        return 0.0
    rates = rates_of(made)
    read = [x.meta["val"] for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
    moving = sum(rates.moving(x) for x in (*made, *read))
    hard = any(name in str(node.target) for name in _EXPONENTIALS)
    computing = rates.computing(flops_of(node), made[0].dtype)
    return computing + moving + hard * made[0].numel() / rates.exponentials


def flops_of(node: fx.Node) -> float:
    """Multiplications and additions of matmuls, convolutions and attention; 0 for other ops."""
    args, kwargs = value_of(node.args), value_of(node.kwargs)
    return flops_of_call(node.target, args, kwargs, node.meta.get("val")) or 0.0


def model_flops_of(node: fx.Node) -> float:
    """As `flops_of`, without the product that a fused backward of attention recomputes: twice its forward."""
    return flops_of(node) * (4 / 5 if _is_attention_backward(str(node.target)) else 1.0)


def flops_of_call(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> float | None:
    """As `flops_of`, for a call with these values; None for ops of other kinds."""
    packet = getattr(target, "overloadpacket", None)
    packet = _IN_PLACE.get(packet, packet)
    if "attention" in str(packet):
        return _attention(str(packet), args)
    if target in PRODUCTS:
        return 2.0 * _product_size(target, args) / args[5]
    if packet in _ROWS:
        return 2.0 * result.numel() * args[1].shape[1]
    count = flop_registry.get(packet)
    return None if count is None else float(count(*args, **kwargs, out_val=result))


def _product_size(target: Any, args: Sequence[Any]) -> int:
    """The rows of a product by expert, times both dims of an expert's weights."""
    dims = args[3] if target is expert_outer else args[1].shape
    return args[0].shape[0] * dims[1] * dims[2]


def _attention(name: str, args: Sequence[Any]) -> float:
    """Two matmuls of `(s, d)` and `(t, d)` for each head of the queries; five in a backward, of which one
    recomputes the scores.

    Keys may have fewer heads than queries.
    """
    shapes = [x.shape for x in args if isinstance(x, Tensor) and x.ndim == 4]
    backward = _is_attention_backward(name)
    if len(shapes) < 2 + backward:
        return 0.0
    q, k = shapes[backward : backward + 2]
    flops = 4.0 * float(q[0] * q[1]) * float(q[2]) * float(k[2]) * float(q[3])
    return flops * (2.5 if backward else 1.0)


def _is_attention_backward(name: str) -> bool:
    return "attention" in name and "backward" in name


def nbytes_of(node: fx.Node) -> int:
    """The bytes of a node's value."""
    return sum(x.nbytes for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor))
