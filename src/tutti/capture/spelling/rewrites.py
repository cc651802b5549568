"""Rewrites of single nodes to a canonical form: op -> function that emits the same value with other ops."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from tutti.capture.spelling import lookups, strided
from tutti.graph.edits.edit import Emit
from tutti.torch_private.op_tables import schema_of

aten = torch.ops.aten
# Canonical views.
VIEWS = (
    aten.reshape.default,
    aten.permute.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
)
Rewrite = Callable[[Emit, fx.Node], fx.Node | tuple[fx.Node | None, ...] | None]


def shape_list(node: Any) -> list[int]:
    """The shape of a node's value."""
    return list(node.meta["val"].shape)


def _same(emit: Emit, node: fx.Node) -> fx.Node:
    x: Any = node.args[0]
    return x


def _conjugate(emit: Emit, node: fx.Node) -> None:
    """The conjugate of a number is a number for its readers: the op takes tensors only."""
    x: Any = node.args[0]
    if isinstance(x, fx.Node):
        return
    for user in list(node.users):
        user.args = map_aggregate(user.args, lambda a: x.conjugate() if a is node else a)
        user.kwargs = map_aggregate(user.kwargs, lambda a: x.conjugate() if a is node else a)


def _cast(emit: Emit, node: fx.Node) -> fx.Node | None:
    """Drop a `_to_copy` without effect; else keep only dtype and device.

    A narrowing cast of a view of a weight becomes the view of the cast: one cast serves every view.
    """
    x, val = node.args[0], node.meta["val"]
    if not isinstance(x, fx.Node):
        return None
    if x.meta["val"].dtype == val.dtype and x.meta["val"].device == val.device:
        return x
    keep = {k: v for k, v in node.kwargs.items() if k in ("dtype", "device") and v is not None}
    if narrows(x, node) and _viewed(x).meta.get("kind") == "parameter":
        return _cast_below(emit, x, keep)
    return emit(aten._to_copy.default, x, **keep)


def narrows(x: fx.Node, cast: fx.Node) -> bool:
    """Whether `cast` holds the floating values of `x` in fewer bytes."""
    before, after = x.meta["val"].dtype, cast.meta["val"].dtype
    both = before.is_floating_point and after.is_floating_point
    return both and after.itemsize < before.itemsize


def _viewed(x: fx.Node) -> fx.Node:
    """The base of the view `x`, or `x` itself."""
    while x.target in VIEWS:
        x = x.args[0]  # type: ignore[assignment]
    return x


def _cast_below(emit: Emit, x: fx.Node, keep: dict[str, Any]) -> fx.Node:
    """`x` cast, with the cast before the views that make `x`."""
    if x.target not in VIEWS:
        return emit(aten._to_copy.default, x, **keep)
    return emit(x.target, _cast_below(emit, x.args[0], keep), *x.args[1:])  # type: ignore[arg-type]


def _view(emit: Emit, node: fx.Node) -> fx.Node:
    """Every op that keeps the elements' order becomes a `view` to the result's shape."""
    x: Any = node.args[0]
    while x.target is aten.reshape.default:
        x = x.args[0]
    if shape_list(x) == shape_list(node):
        return x
    return _dropped(emit, x, shape_list(node)) or emit(aten.reshape.default, x, shape_list(node))


def _dropped(emit: Emit, x: fx.Node, shape: list[int]) -> fx.Node | None:
    """A sum that keeps its dims, then a view without them (a bias's gradient), is a sum that drops them."""
    if x.target is not aten.sum.dim_IntList or x.args[2:] != (True,):
        return None
    summed: Any = x.args[0]
    dims: Any = x.args[1]
    gone = {d % len(shape_list(summed)) for d in dims}
    rest = [n for d, n in enumerate(shape_list(summed)) if d not in gone]
    return emit(aten.sum.dim_IntList, summed, dims, False, **x.kwargs) if rest == shape else None


def _permute(emit: Emit, node: fx.Node) -> fx.Node:
    given: Any = node.args
    x = given[0]
    rank = len(shape_list(x))
    order = list(range(rank))
    if node.target in (aten.permute.default, aten.permute_copy.default):
        order = [d % rank for d in given[1]]
    elif rank > 1:
        turned = node.target in (aten.t.default, aten.t_copy.default)
        a, b = (0, 1) if turned else (d % rank for d in given[1:3])
        order[a], order[b] = order[b], order[a]
    if order == list(range(rank)):
        return x
    if x.target is aten.permute.default:
        inner, x = x.args[1], x.args[0]
        order = [inner[d] for d in order]
        if order == list(range(rank)):
            return x
    return emit(aten.permute.default, x, order)


def _viewing(view: Any) -> Rewrite:
    """The view in place of its copy."""

    def rewrite(emit: Emit, node: fx.Node) -> fx.Node:
        return emit(view, *node.args)

    return rewrite


def _narrow(emit: Emit, node: fx.Node) -> fx.Node:
    x: Any = node.args[0]
    dim: Any = node.args[1]
    start: Any = node.args[2]
    size = shape_list(x)[dim]
    first = start + size if start < 0 else start
    return emit(aten.slice.Tensor, x, dim, first, first + node.args[3])


def _split(emit: Emit, node: fx.Node) -> tuple[fx.Node, ...]:
    """split, split_with_sizes, chunk: one slice per part."""
    x: Any = node.args[0]
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    dim %= len(shape_list(x))  # type: ignore[operator]
    start, parts = 0, []
    for part in node.meta["val"]:
        size = part.shape[dim]
        parts.append(emit(aten.slice.Tensor, x, dim, start, start + size))
        start += size
    return tuple(parts)


def _cat(emit: Emit, node: fx.Node) -> fx.Node | None:
    """Drop empty parts (a cache that starts empty), and the op for a single part (`einops.pack([x])`)."""
    parts: Any = node.args[0]
    kept = [x for x in parts if x.meta["val"].numel()]
    if not any(x.meta["val"].dtype == node.meta["val"].dtype for x in kept):
        return None  # an empty part decides the dtype
    if len(kept) == 1:
        return kept[0]
    return emit(node.target, kept, *node.args[1:]) if len(kept) < len(parts) else None


def _unbind(emit: Emit, node: fx.Node) -> tuple[fx.Node, ...]:
    given: Any = node.args
    x = given[0]
    dim = (given[1] if len(given) > 1 else 0) % len(shape_list(x))
    return tuple(emit(aten.select.int, x, dim, i) for i in range(shape_list(x)[dim]))


def _slice(emit: Emit, node: fx.Node) -> fx.Node | None:
    return node.args[0] if shape_list(node.args[0]) == shape_list(node) else None  # type: ignore[return-value]


def _slice_backward(emit: Emit, node: fx.Node) -> fx.Node | None:
    """The gradient of a slice that takes a whole dim."""
    x: Any = node.args[0]
    return x if shape_list(x) == shape_list(node) else None


def _add(emit: Emit, node: fx.Node) -> fx.Node | None:
    """Drop the initial 0 of Python's `sum`, which would stop pending sums."""
    x, y = node.args[:2]
    if isinstance(y, fx.Node) or y != 0 or not isinstance(x, fx.Node):
        return None
    return x if x.meta["val"].dtype == node.meta["val"].dtype else None


def _mean(emit: Emit, node: fx.Node) -> fx.Node:
    """mean = sum / count, the count that of the whole tensor: so no mean of means arises."""
    x: Any = node.args[0]
    dims = node.args[1] if len(node.args) > 1 else None
    rank = len(shape_list(x))
    dims = [d % rank for d in dims] if dims and rank else list(range(rank))  # type: ignore[union-attr]
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    count = math.prod(shape_list(x)[d] for d in dims)
    total = emit(aten.sum.dim_IntList, x, dims, keep, dtype=node.meta["val"].dtype)
    return emit(aten.div.Tensor, total, float(count))


def _sum(emit: Emit, node: fx.Node) -> fx.Node:
    x: Any = node.args[0]
    keep = {k: v for k, v in node.kwargs.items() if v is not None}
    return emit(aten.sum.dim_IntList, x, list(range(len(shape_list(x)))), False, **keep)


def _sum_dims(emit: Emit, node: fx.Node) -> fx.Node | None:
    """A sum without dims is over all dims."""
    x, dims, *rest = node.args
    if dims:
        return None
    return emit(node.target, x, list(range(len(shape_list(x)))), *rest, **node.kwargs)


def _nll_forward(emit: Emit, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Normalize by the whole batch's weight: sum over tokens, weight of tokens, then one division.

    The weight depends on labels alone, so micro-batches can have it before the losses.
    """
    logp, target, weight, reduction, ignore = node.args
    if reduction != 1:
        return None
    both = emit(node.target, logp, target, weight, 2, ignore)
    total = emit(operator.getitem, both, 0)
    valid = emit(aten.ne.Scalar, target, ignore)
    if weight is not None:
        labels = emit(aten.mul.Tensor, target, valid)  # an ignored one may be no class
        valid = emit(aten.mul.Tensor, emit(aten.index.Tensor, weight, [labels]), valid)
    axes = list(range(len(shape_list(target))))
    count = emit(aten.sum.dim_IntList, valid, axes, False, dtype=node.meta["val"][0].dtype)
    return emit(aten.div.Tensor, total, count), count


def _nll_backward(emit: Emit, node: fx.Node) -> fx.Node | None:
    """The weight of the batch divides a mean; a sum, or single losses, do not read it."""
    given: Any = node.args
    grad, logp, target, weight, reduction, ignore, total_weight = given
    if total_weight.target is aten.full.default:
        return None
    if reduction == 1:
        grad, reduction = emit(aten.div.Tensor, grad, total_weight), 2
    dtype, device = logp.meta["val"].dtype, logp.meta["val"].device
    unread = emit(aten.full.default, [], 0.0, dtype=dtype, device=device)
    return emit(node.target, grad, logp, target, weight, reduction, ignore, unread)


def _nll2d_forward(emit: Emit, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Classes in dim 1 of an image: the loss of its pixels, classes last."""
    logp, target, *rest = node.args
    flat = _pixels(emit, logp)
    both = emit(
        aten.nll_loss_forward.default, flat, emit(aten.reshape.default, target, [-1]), *rest
    )
    first, second = (emit(operator.getitem, both, i) for i in (0, 1))
    if rest[1] == 0:
        first = emit(aten.reshape.default, first, shape_list(target))
    return first, second


def _nll2d_backward(emit: Emit, node: fx.Node) -> fx.Node:
    grad, logp, target, *rest = node.args
    n, c, *space = shape_list(logp)
    if rest[1] == 0:
        grad = emit(aten.reshape.default, grad, [-1])
    labels = emit(aten.reshape.default, target, [-1])
    flat = emit(aten.nll_loss_backward.default, grad, _pixels(emit, logp), labels, *rest)
    image = emit(aten.reshape.default, flat, [n, *space, c])
    order = [0, len(space) + 1, *range(1, len(space) + 1)]
    return emit(aten.permute.default, image, order)


def _pixels(emit: Emit, x: Any) -> fx.Node:
    rank = len(shape_list(x))
    last = emit(aten.permute.default, x, [0, *range(2, rank), 1])
    return emit(aten.reshape.default, last, [-1, shape_list(x)[1]])


def _like(emit: Emit, node: fx.Node) -> fx.Node:
    """`ones_like(x)` and its like as `full` of the shape of x, on whose values they do not depend."""
    name = schema_of(node.target).name.removeprefix("aten::").removeprefix("new_")
    fill: Any = {
        "ones": 1,
        "zeros": 0,
        "zero": 0,
        "empty": 0,
        "empty_strided": 0,
        "scalar_tensor": None,
    }.get(name.removesuffix("_like"))
    if name.startswith("full"):
        fill = node.args[-1]
    elif name == "scalar_tensor":
        fill = node.args[0]
    val: Tensor = node.meta["val"]
    return emit(aten.full.default, list(val.shape), fill, dtype=val.dtype, device=val.device)


def _fill(emit: Emit, node: fx.Node) -> fx.Node | None:
    x: Any = node.args[0]
    if isinstance(node.args[1], fx.Node) and isinstance(node.args[1].meta["val"], Tensor):
        return _copy(emit, node)
    val = node.meta["val"]
    return emit(aten.full.default, shape_list(x), node.args[1], dtype=val.dtype, device=val.device)


def _copy(emit: Emit, node: fx.Node) -> fx.Node:
    """`copy(x, y)` has the values of y in the shape and dtype of x, on its device."""
    x, y = node.args[:2]
    value: Any = y
    given, wanted = value.meta["val"], node.meta["val"]
    if given.device != wanted.device:  # a number, which Python keeps on the CPU
        value = emit(aten._to_copy.default, value, dtype=wanted.dtype, device=wanted.device)
    if shape_list(value) != shape_list(x):
        value = emit(aten.expand.default, value, shape_list(x))
    if value.meta["val"].dtype != wanted.dtype:
        value = emit(aten._to_copy.default, value, dtype=wanted.dtype)
    return value


_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view_copy.default,
    aten._reshape_alias_copy.default,
    aten.unsqueeze_copy.default,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
)
# A copy of a view has the values of the view: the graph has no storage to tell them apart.
_COPIES = {
    aten.expand_copy.default: aten.expand.default,
    aten.slice_copy.Tensor: aten.slice.Tensor,
    aten.select_copy.int: aten.select.int,
    aten.diagonal_copy.default: aten.diagonal.default,
    aten.unfold_copy.default: aten.unfold.default,
    aten.view_as_real_copy.default: aten.view_as_real.default,
    aten.view_as_complex_copy.default: aten.view_as_complex.default,
}
_CREATE = (
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.zeros.default,
    aten.zero.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.new_empty_strided.default,
    aten.empty_strided.default,
    aten.scalar_tensor.default,
)
REWRITES: dict[Any, Rewrite] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.lift.default: _same,
    aten.alias_copy.default: _same,
    aten.detach_copy.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten._conj.default: _conjugate,
    aten._to_copy.default: _cast,
    **dict.fromkeys(_VIEWS, _view),
    **{copy: _viewing(view) for copy, view in _COPIES.items()},
    aten.narrow_copy.default: _narrow,
    aten.t.default: _permute,
    aten.transpose.int: _permute,
    aten.permute.default: _permute,
    aten.t_copy.default: _permute,
    aten.transpose_copy.int: _permute,
    aten.permute_copy.default: _permute,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.split_copy.Tensor: _split,
    aten.split_with_sizes_copy.default: _split,
    aten.chunk.default: _split,
    aten.unsafe_split.Tensor: _split,
    aten.unsafe_split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.unbind.int: _unbind,
    aten.unbind_copy.int: _unbind,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.add.Tensor: _add,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum_dims,
    aten.nll_loss_forward.default: _nll_forward,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_forward.default: _nll2d_forward,
    aten.nll_loss2d_backward.default: _nll2d_backward,
    **dict.fromkeys(_CREATE, _like),
    aten.fill.Scalar: _fill,
    aten.fill.Tensor: _fill,
    aten.copy.default: _copy,
    aten.index.Tensor: lookups.looked_up,
    aten.index_put.default: lookups.put,
    aten.as_strided.default: strided.strided,
    aten.as_strided_scatter.default: strided.strided_scatter,
    aten._linalg_det.default: strided.determinant,
    aten._linalg_slogdet.default: strided.determinant,
}
SAME = frozenset(target for target, rewrite in REWRITES.items() if rewrite is _same)
# Rewrites of nodes that other rewrites may make.
AGAIN = (aten.nll_loss_forward.default, aten.nll_loss_backward.default)
