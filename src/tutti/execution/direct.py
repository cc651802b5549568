"""Finds PyTorch's own bindings of ops, which parse arguments faster than an op's overload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from tutti.torch_private.op_tables import NN_BINDINGS, OpOverload, boxed_call

aten = torch.ops.aten
# Functions of `torch`, and the names of the overloads that they equal.
_FUNCTIONS = (
    "mm.default mm.out addmm.default addmm.out bmm.default bmm.out baddbmm.default reshape.default "
    "permute.default unsqueeze.default clone.default cat.default "
    "add.Tensor add.Scalar add.out sub.Tensor sub.Scalar sub.out mul.Tensor mul.Scalar mul.out "
    "div.Tensor div.Scalar div.out div.Tensor_mode div.out_mode floor_divide.default floor_divide.out "
    "pow.Tensor_Scalar neg.default exp.default log.default sqrt.default "
    "rsqrt.default tanh.default sigmoid.default relu.default erf.default "
    "sum.dim_IntList mean.dim amax.default where.self full.default full_like.default "
    "eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar "
    "gt.Tensor gt.Scalar ge.Tensor ge.Scalar bitwise_and.Tensor logical_not.default "
    "embedding.default convolution.default native_layer_norm.default _softmax.default "
    "_log_softmax.default _scaled_dot_product_flash_attention_for_cpu.default"
)
# The same for methods of a tensor.
_METHODS = (
    "copy_.default zero_.default fill_.Scalar expand.default view.default "
    "add_.Tensor add_.Scalar sub_.Tensor sub_.Scalar mul_.Tensor mul_.Scalar div_.Tensor div_.Scalar "
    "div_.Tensor_mode floor_divide_.Tensor "
    "neg_.default exp_.default log_.default sqrt_.default rsqrt_.default tanh_.default sigmoid_.default "
    "relu_.default bitwise_and_.Tensor clamp_max_.default clamp_min_.default index_add_.default"
)
_NN = "linear.default linear.out gelu.default silu.default"


def _listed(names: str, home: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    for name, _, overload in (whole.partition(".") for whole in names.split()):
        op, function = getattr(aten, name, None), getattr(home, name, None)
        if function is not None and hasattr(op, overload):
            yield getattr(op, overload), function


DIRECT: dict[Any, Callable[..., Any]] = {
    **dict(_listed(_FUNCTIONS, torch)),
    **dict(_listed(_METHODS, Tensor)),
    **dict(_listed(_NN, NN_BINDINGS)),
}


def direct(function: Any) -> tuple[Any, ...]:
    """The function to call for an op, and the arguments to put before the op's own.

    If PyTorch has no binding for an op, the dispatcher's own call parses arguments in half the time of the
    op's overload. It takes no number for a tensor: the tables above have all ops that may get one (`x // 2`).
    """
    if function in DIRECT:
        return (DIRECT[function],)
    if not isinstance(function, OpOverload):
        return (function,)
    return boxed_call(function)


def shorter(node: fx.Node) -> str | None:
    """An equivalent method call with fewer arguments, without its tensor: a swap of two dims, a slice, a
    square."""
    if node.target is aten.pow.Tensor_Scalar:
        x: Any = node.args[0]
        is_square = node.args[1] == 2 and node.meta["val"].dtype == x.meta["val"].dtype
        return "square()" if is_square else None
    if node.target is aten.permute.default:
        return _swapped(node.args[1])
    if node.target is aten.slice.Tensor:
        return _narrowed(node)
    return None


def _swapped(dims: Any) -> str | None:
    given = [d % len(dims) for d in dims]
    moved = [d for d, source in enumerate(given) if d != source]
    if len(moved) != 2:
        return None
    return "t()" if len(dims) == 2 else f"transpose({moved[0]}, {moved[1]})"


def _narrowed(node: fx.Node) -> str | None:
    given: Any = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    x, dim, start, _, step = given
    size, length = x.meta["val"].shape[dim], node.meta["val"].shape[dim]
    start = 0 if start is None else start
    whole = isinstance(start, int) and isinstance(length, int)
    if step != 1 or node.kwargs or not whole:
        return None
    return f"narrow({dim}, {slice(start, None).indices(size)[0]}, {length})"
