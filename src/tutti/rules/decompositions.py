"""Decompositions into simpler ops, for ops with a split in a factor that they need whole.

A softmax over a sharded vocabulary becomes max, exp and sum with small all-reduces; batch statistics over
a sharded batch become sums. Each function emits the same values up to rounding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tutti.graph.edits.edit import Emit, added, squares
from tutti.rules.families import added_rows
from tutti.rules.families.norms import length_dim
from tutti.rules.rule import shape

aten = torch.ops.aten
New = fx.Node | tuple[fx.Node | None, ...] | None


def _sum(emit: Emit, x: fx.Node, dims: list[int], keep: bool = True) -> fx.Node:
    return emit(aten.sum.dim_IntList, x, dims, keep)


def _to(emit: Emit, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if x.meta["val"].dtype == dtype else emit(aten._to_copy.default, x, dtype=dtype)


def _like(emit: Emit, x: fx.Node, node: Any) -> fx.Node:
    """`x` in the dtype of `node`'s result."""
    val = node.meta["val"]
    return _to(emit, x, (val[0] if isinstance(val, list | tuple) else val).dtype)


def _shifted(emit: Emit, x: fx.Node, dim: int) -> tuple[fx.Node, fx.Node]:
    top = emit(aten.amax.default, x, [dim], True)
    return emit(aten.sub.Tensor, x, top), top


def _log_softmax(emit: Emit, node: fx.Node) -> New:
    x, dim = node.args[:2]
    shifted, _ = _shifted(emit, _like(emit, x, node), dim)  # type: ignore[arg-type]
    total = _sum(emit, emit(aten.exp.default, shifted), [dim])  # type: ignore[list-item]
    return emit(aten.sub.Tensor, shifted, emit(aten.log.default, total))


def _softmax(emit: Emit, node: fx.Node) -> New:
    x, dim = node.args[:2]
    shifted, _ = _shifted(emit, _like(emit, x, node), dim)  # type: ignore[arg-type]
    raised = emit(aten.exp.default, shifted)
    return emit(aten.div.Tensor, raised, _sum(emit, raised, [dim]))  # type: ignore[list-item]


def _log_softmax_backward(emit: Emit, node: fx.Node) -> New:
    grad, out, dim = node.args[:3]
    total = _sum(emit, grad, [dim])  # type: ignore[arg-type, list-item]
    return _like(
        emit,
        emit(aten.sub.Tensor, grad, emit(aten.mul.Tensor, emit(aten.exp.default, out), total)),
        node,
    )


def _softmax_backward(emit: Emit, node: fx.Node) -> New:
    grad, out, dim = node.args[:3]
    both = emit(aten.mul.Tensor, grad, out)
    total = _sum(emit, both, [dim])  # type: ignore[list-item]
    return _like(emit, emit(aten.sub.Tensor, both, emit(aten.mul.Tensor, out, total)), node)


def _logsumexp(emit: Emit, node: fx.Node) -> New:
    x: Any = node.args[0]
    dims: Any = [d % len(shape(x)) for d in node.args[1]]  # type: ignore[union-attr]
    top = emit(aten.amax.default, x, dims, True)
    # a line of only -inf sums to -inf, not to inf - inf
    top = emit(aten.masked_fill.Scalar, top, emit(aten.isinf.default, top), 0.0)
    total = _sum(emit, emit(aten.exp.default, emit(aten.sub.Tensor, x, top)), dims)
    out = emit(aten.add.Tensor, emit(aten.log.default, total), top)
    return out if shape(out) == shape(node) else emit(aten.reshape.default, out, list(shape(node)))


def _addmm(emit: Emit, node: fx.Node) -> New:
    given: Any = node.args
    bias, a, b = given
    matmul = emit(aten.mm.default if len(shape(b)) == 2 else aten.mv.default, a, b)
    return added(emit, node, bias, matmul)


def _convolution(emit: Emit, node: fx.Node) -> New:
    """The bias added apart: each rank's part of the input channels would add it again."""
    x, weight, bias, *rest = node.args
    if bias is None:
        return None
    out = emit(node.target, x, weight, None, *rest)
    return emit(aten.add.Tensor, out, _channel(emit, bias, len(shape(out))))


def _convolution_backward(emit: Emit, node: fx.Node) -> New:
    """The gradient of the bias as a sum of its own."""
    given: Any = node.args
    grad, x, weight, _, *rest, mask = given
    if not mask[2]:
        return None
    both = emit(node.target, grad, x, weight, None, *rest, [mask[0], mask[1], False])
    dims = [d for d in range(len(shape(grad))) if d != 1]
    first = [emit(operator.getitem, both, i) if mask[i] else None for i in (0, 1)]
    return (*first, _sum(emit, grad, dims, False))


def _vector_norm(emit: Emit, node: fx.Node) -> New:
    x: Any = node.args[0]
    order: Any = node.args[1] if len(node.args) > 1 else 2
    dims: Any = node.args[2] if len(node.args) > 2 and node.args[2] else range(len(shape(x)))
    dims = [d % len(shape(x)) for d in dims]
    keep = bool(node.args[3]) if len(node.args) > 3 else False
    dtype = node.meta["val"].dtype
    x = _to(emit, x, dtype.to_complex() if x.meta["val"].is_complex() else dtype)
    if order == 2:
        return emit(aten.sqrt.default, _sum(emit, squares(emit, x), dims, keep))
    size = emit(aten.abs.default, x)
    if order == math.inf:
        return emit(aten.amax.default, size, dims, keep)
    if order == -math.inf:
        return emit(aten.amin.default, size, dims, keep)
    if order == 0:
        return _sum(emit, _like(emit, emit(aten.ne.Scalar, x, 0), node), dims, keep)
    total = _sum(emit, emit(aten.pow.Tensor_Scalar, size, order), dims, keep)
    return emit(aten.pow.Tensor_Scalar, total, 1.0 / order)


def _moments(emit: Emit, x: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Mean, centered values and variance, over `dims` (kept)."""
    count = float(math.prod(shape(x)[d] for d in dims))
    mean = emit(aten.div.Tensor, _sum(emit, x, dims), count)
    centered = emit(aten.sub.Tensor, x, mean)
    total = _sum(emit, squares(emit, centered), dims)
    return mean, centered, emit(aten.div.Tensor, total, count)


def _variance(emit: Emit, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    x: Any = node.args[0]
    dims: Any = node.args[1] if len(node.args) > 1 and node.args[1] else range(len(shape(x)))
    dims = [d % len(shape(x)) for d in dims]
    correction: Any = node.kwargs.get("correction", 1)
    correction = 1 if correction is None else correction
    count = math.prod(shape(x)[d] for d in dims)
    mean, _, var = _moments(emit, x, dims)
    if correction:
        var = emit(aten.mul.Tensor, var, count / max(0.0, count - correction))
    val: Any = node.meta["val"]
    out = list((val[0] if isinstance(val, list | tuple) else val).shape)
    return emit(aten.reshape.default, var, out), emit(aten.reshape.default, mean, out)


def _var(emit: Emit, node: fx.Node) -> New:
    return _variance(emit, node)[0]


def _std(emit: Emit, node: fx.Node) -> New:
    return emit(aten.sqrt.default, _variance(emit, node)[0])


def _layer_norm(emit: Emit, node: fx.Node) -> New:
    x, normalized, weight, bias, eps = node.args
    x = _to(emit, x, node.meta["val"][1].dtype)  # type: ignore[arg-type]
    dims = list(range(len(shape(x)) - len(normalized), len(shape(x))))  # type: ignore[arg-type]
    mean, centered, var = _moments(emit, x, dims)
    rstd = emit(aten.rsqrt.default, emit(aten.add.Tensor, var, eps))
    out = emit(aten.mul.Tensor, centered, rstd)
    if weight is not None:
        out = emit(aten.mul.Tensor, out, weight)
    if bias is not None:
        out = emit(aten.add.Tensor, out, bias)
    return _like(emit, out, node), mean, rstd


def _rms_norm(emit: Emit, node: fx.Node) -> New:
    x, normalized, weight, eps = node.args
    vals = node.meta["val"]
    eps = torch.finfo(vals[0].dtype).eps if eps is None else eps
    x = _to(emit, x, vals[1].dtype)  # type: ignore[arg-type]
    dims = list(range(len(shape(x)) - len(normalized), len(shape(x))))  # type: ignore[arg-type]
    count = float(math.prod(shape(x)[d] for d in dims))
    mean = emit(aten.div.Tensor, _sum(emit, squares(emit, x), dims), count)
    rstd = emit(aten.rsqrt.default, emit(aten.add.Tensor, mean, eps))
    out = emit(aten.mul.Tensor, x, rstd)
    if weight is not None:
        out = emit(aten.mul.Tensor, out, weight)
    return _like(emit, out, node), rstd


def _layer_norm_backward(emit: Emit, node: fx.Node) -> New:
    grad, x, normalized, mean, rstd, weight, _, mask = node.args
    stat_dtype = mean.meta["val"].dtype  # type: ignore[union-attr]
    rank, num = len(shape(x)), len(normalized)  # type: ignore[arg-type]
    dims, lead = list(range(rank - num, rank)), list(range(rank - num))
    x, grad = _to(emit, x, stat_dtype), _to(emit, grad, stat_dtype)  # type: ignore[arg-type]
    xhat = emit(aten.mul.Tensor, emit(aten.sub.Tensor, x, mean), rstd)
    scaled = grad if weight is None else emit(aten.mul.Tensor, grad, weight)
    count = float(math.prod(shape(x)[d] for d in dims))
    first = emit(aten.div.Tensor, _sum(emit, scaled, dims), count)
    second = emit(aten.div.Tensor, _sum(emit, emit(aten.mul.Tensor, scaled, xhat), dims), count)
    inner = emit(aten.sub.Tensor, scaled, first)
    inner = emit(aten.sub.Tensor, inner, emit(aten.mul.Tensor, xhat, second))
    dx = emit(aten.mul.Tensor, inner, rstd)
    vals = node.meta["val"]
    want: Any = mask
    dw = _sum(emit, emit(aten.mul.Tensor, grad, xhat), lead, False) if want[1] else None
    db = _sum(emit, grad, lead, False) if want[2] else None
    return tuple(
        None if v is None or r is None else _to(emit, r, v.dtype)
        for r, v in zip((dx, dw, db), vals, strict=True)
    )


def _channel(emit: Emit, x: Any, rank: int) -> fx.Node:
    return emit(aten.reshape.default, x, [1, shape(x)[0], *[1] * (rank - 2)])


def _batch_norm(emit: Emit, node: fx.Node) -> New:
    """Statistics of the whole batch, as sums over the ranks' parts."""
    x, weight, bias, mean, var, training, momentum, eps = node.args
    if not training:
        return None
    rank = len(shape(x))
    channels = shape(x)[1]
    dims = [d for d in range(rank) if d != 1]
    count = math.prod(shape(x)[d] for d in dims)
    wide = _to(emit, x, node.meta["val"][1].dtype)  # type: ignore[arg-type]
    batch_mean, centered, batch_var = _moments(emit, wide, dims)
    invstd = emit(aten.rsqrt.default, emit(aten.add.Tensor, batch_var, eps))
    out = emit(aten.mul.Tensor, centered, invstd)
    if weight is not None:
        out = emit(aten.mul.Tensor, out, _channel(emit, weight, rank))
    if bias is not None:
        out = emit(aten.add.Tensor, out, _channel(emit, bias, rank))
    flat_mean = emit(aten.reshape.default, batch_mean, [channels])
    flat_var = emit(aten.reshape.default, batch_var, [channels])
    unbiased = emit(aten.mul.Tensor, flat_var, count / max(1, count - 1))
    saved = emit(aten.reshape.default, invstd, [channels])
    if len(node.meta["val"]) == 3:
        return _like(emit, out, node), flat_mean, saved
    return (
        _like(emit, out, node),
        flat_mean,
        saved,
        _mixed(emit, mean, flat_mean, momentum),
        _mixed(emit, var, unbiased, momentum),
    )


def _mixed(emit: Emit, old: Any, new: fx.Node, momentum: Any) -> fx.Node:
    kept = emit(aten.mul.Tensor, old, 1 - momentum)
    taken = _to(emit, emit(aten.mul.Tensor, new, momentum), old.meta["val"].dtype)
    return emit(aten.add.Tensor, kept, taken)


def _batch_norm_backward(emit: Emit, node: fx.Node) -> New:
    grad, x, weight, _, _, mean, invstd, training, _, mask = node.args
    if not training:
        return None
    rank = len(shape(x))
    dims = [d for d in range(rank) if d != 1]
    count = float(math.prod(shape(x)[d] for d in dims))
    stat_dtype = mean.meta["val"].dtype  # type: ignore[union-attr]
    x, grad = _to(emit, x, stat_dtype), _to(emit, grad, stat_dtype)  # type: ignore[arg-type]
    rstd = _channel(emit, invstd, rank)
    xhat = emit(aten.mul.Tensor, emit(aten.sub.Tensor, x, _channel(emit, mean, rank)), rstd)
    db = _sum(emit, grad, dims)
    dw = _sum(emit, emit(aten.mul.Tensor, grad, xhat), dims)
    inner = emit(aten.sub.Tensor, grad, emit(aten.div.Tensor, db, count))
    inner = emit(
        aten.sub.Tensor, inner, emit(aten.mul.Tensor, xhat, emit(aten.div.Tensor, dw, count))
    )
    dx = emit(aten.mul.Tensor, inner, rstd)
    if weight is not None:
        dx = emit(aten.mul.Tensor, dx, _channel(emit, weight, rank))
    channels = [shape(x)[1]]
    want: Any = mask
    flat = [
        dx if want[0] else None,
        emit(aten.reshape.default, dw, channels) if want[1] else None,
        emit(aten.reshape.default, db, channels) if want[2] else None,
    ]
    return tuple(
        None if v is None or r is None else _to(emit, r, v.dtype)
        for r, v in zip(flat, node.meta["val"], strict=True)
    )


def _weight_norm(emit: Emit, node: fx.Node) -> New:
    """Norms of split rows, from sums of squares."""
    v, g = (_to(emit, x, node.meta["val"][1].dtype) for x in node.args[:2])  # type: ignore[arg-type]
    dims = [i for i in range(len(shape(v))) if i != length_dim(node)]
    norms = emit(aten.sqrt.default, _sum(emit, squares(emit, v), dims))
    scale = emit(aten.div.Tensor, g, norms)
    return _like(emit, emit(aten.mul.Tensor, v, scale), node), norms


def _weight_norm_backward(emit: Emit, node: fx.Node) -> New:
    dtype = node.args[3].meta["val"].dtype  # type: ignore[union-attr]
    grad, v, g, norms = (_to(emit, x, dtype) for x in node.args[:4])  # type: ignore[arg-type]
    dims = [i for i in range(len(shape(v))) if i != length_dim(node)]
    along = _sum(emit, emit(aten.mul.Tensor, grad, v), dims)
    dg = emit(aten.div.Tensor, along, norms)
    radial = emit(aten.div.Tensor, dg, norms)
    across = emit(aten.sub.Tensor, grad, emit(aten.mul.Tensor, v, radial))
    dv = emit(aten.mul.Tensor, across, emit(aten.div.Tensor, g, norms))
    vals = node.meta["val"]
    return _to(emit, dv, vals[0].dtype), _to(emit, dg, vals[1].dtype)


DECOMPOSITIONS: dict[Any, Callable[[Emit, fx.Node], New]] = {
    aten._log_softmax.default: _log_softmax,
    aten._softmax.default: _softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.logsumexp.default: _logsumexp,
    aten.addmm.default: _addmm,
    aten.addmv.default: _addmm,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.var.correction: _var,
    aten.var_mean.correction: _variance,
    aten.std.correction: _std,
    aten._weight_norm_interface.default: _weight_norm,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    **added_rows.DECOMPOSITIONS,
}
