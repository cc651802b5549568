"""Ops as a few simpler ones: shuffles, rotations, sums of products. A table as in `rewrites`."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from tutti.capture.spelling.rewrites import Rewrite, shape_list
from tutti.graph.edits.edit import Emit, added
from tutti.torch_private.op_tables import schema_of

aten = torch.ops.aten


def _norm(emit: Emit, node: fx.Node) -> fx.Node:
    """`Tensor.norm` and ops built on it, such as pairwise distances."""
    x, p, dims, keep = (*node.args, *(None,) * 4)[:4]
    dtype = node.kwargs.get("dtype")
    return emit(
        aten.linalg_vector_norm.default,
        x,
        2 if p is None else p,
        dims or None,
        bool(keep),
        dtype=dtype,
    )


def _pixel_shuffle(emit: Emit, node: fx.Node) -> fx.Node:
    x: Any = node.args[0]
    r: Any = node.args[1]
    *lead, c, h, w = shape_list(x)
    k = len(lead)
    parts = emit(aten.reshape.default, x, [*lead, c // (r * r), r, r, h, w])
    order = [*range(k), k, k + 3, k + 1, k + 4, k + 2]
    moved = emit(aten.permute.default, parts, order)
    return emit(aten.reshape.default, moved, [*lead, c // (r * r), h * r, w * r])


def _pixel_unshuffle(emit: Emit, node: fx.Node) -> fx.Node:
    x: Any = node.args[0]
    r: Any = node.args[1]
    *lead, c, h, w = shape_list(x)
    k = len(lead)
    parts = emit(aten.reshape.default, x, [*lead, c, h // r, r, w // r, r])
    order = [*range(k), k, k + 2, k + 4, k + 1, k + 3]
    moved = emit(aten.permute.default, parts, order)
    return emit(aten.reshape.default, moved, [*lead, c * r * r, h // r, w // r])


def _baddbmm(emit: Emit, node: fx.Node) -> fx.Node:
    x, a, b = node.args
    return added(emit, node, x, emit(aten.bmm.default, a, b))


def _addbmm(emit: Emit, node: fx.Node) -> fx.Node:
    """The sum of a batch of matmuls is one matmul over batch and inner dim."""
    given: Any = node.args
    x, a, b = given
    batch, m, k = shape_list(a)
    left = emit(aten.reshape.default, emit(aten.permute.default, a, [1, 0, 2]), [m, batch * k])
    right = emit(aten.reshape.default, b, [batch * k, shape_list(b)[2]])
    return added(emit, node, x, emit(aten.mm.default, left, right))


def _addr(emit: Emit, node: fx.Node) -> fx.Node:
    given: Any = node.args
    x, rows, columns = given
    column = emit(aten.reshape.default, rows, [shape_list(rows)[0], 1])
    return added(emit, node, x, emit(aten.mul.Tensor, column, columns))


def _channel_shuffle(emit: Emit, node: fx.Node) -> fx.Node:
    x: Any = node.args[0]
    num_groups: Any = node.args[1]
    n, c, *space = shape_list(x)
    parts = emit(aten.reshape.default, x, [n, num_groups, c // num_groups, *space])
    order = [0, 2, 1, *range(3, len(space) + 3)]
    return emit(aten.reshape.default, emit(aten.permute.default, parts, order), [n, c, *space])


def _rot90(emit: Emit, node: fx.Node) -> fx.Node:
    """Rotations by 90 degrees: a flip and a transpose, or two flips."""
    x, times, dims = (*node.args, *(1, [0, 1])[len(node.args) - 1 :])
    rank = len(shape_list(x))
    a, b = (d % rank for d in dims)  # type: ignore[union-attr]
    order = list(range(rank))
    order[a], order[b] = b, a
    match times % 4:  # type: ignore[operator]
        case 0:
            return x  # type: ignore[return-value]
        case 2:
            return emit(aten.flip.default, x, [a, b])
        case k:
            flipped = emit(aten.flip.default, x, [b if k == 1 else a])
            return emit(aten.permute.default, flipped, order)


def _trace(emit: Emit, node: fx.Node) -> fx.Node:
    line = emit(aten.diagonal.default, node.args[0])
    return emit(aten.sum.dim_IntList, line, [0], False)


def _block_diag(emit: Emit, node: fx.Node) -> fx.Node | None:
    """Each block between zeros at its left and right, one below the other."""
    blocks: Any = node.args[0]
    if len({x.meta["val"].dtype for x in blocks}) > 1:
        return None
    width, before, rows = shape_list(node)[1], 0, []
    for x in blocks:
        shape = [1] * (2 - len(shape_list(x))) + shape_list(x)
        x = x if len(shape_list(x)) == 2 else emit(aten.reshape.default, x, shape)
        after = width - before - shape[1]
        rows.append(emit(aten.constant_pad_nd.default, x, [before, after], 0.0))
        before += shape[1]
    return emit(aten.cat.default, rows, 0)


def _take(emit: Emit, node: fx.Node) -> fx.Node:
    flat = emit(aten.reshape.default, node.args[0], [-1])
    return emit(aten.index.Tensor, flat, [node.args[1]])


def _put(emit: Emit, node: fx.Node) -> fx.Node:
    x, index, source, *accumulate = node.args
    flat = emit(aten.reshape.default, x, [-1])
    source = emit(aten.reshape.default, source, shape_list(index))
    new = emit(aten.index_put.default, flat, [index], source, bool(accumulate and accumulate[0]))
    return emit(aten.reshape.default, new, shape_list(x))


def _nansum(emit: Emit, node: fx.Node) -> fx.Node:
    x, dims, keep = (*node.args, *(None, False)[len(node.args) - 1 :])
    known = emit(aten.masked_fill.Scalar, x, emit(aten.isnan.default, x), 0.0)
    dims = dims or list(range(len(shape_list(x))))
    dtype = node.meta["val"].dtype
    return emit(aten.sum.dim_IntList, known, dims, bool(keep), dtype=dtype)


def _std_mean(emit: Emit, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    both = emit(aten.var_mean.correction, *node.args, **node.kwargs)
    var, mean = (emit(operator.getitem, both, i) for i in (0, 1))
    return emit(aten.sqrt.default, var), mean


def _renorm(emit: Emit, node: fx.Node) -> fx.Node:
    """Scale each slice along `dim` down to the largest norm allowed, with PyTorch's epsilon."""
    given: Any = node.args
    x, p, dim, limit = given
    rest = [d for d in range(len(shape_list(x))) if d != dim % len(shape_list(x))]
    norms = emit(aten.linalg_vector_norm.default, x, p, rest, True)
    down = emit(aten.reciprocal.default, emit(aten.add.Tensor, norms, 1e-7))
    down = emit(aten.mul.Tensor, down, limit)
    within = emit(aten.le.Scalar, norms, limit)
    return emit(aten.mul.Tensor, x, emit(aten.masked_fill.Scalar, down, within, 1.0))


def _margin_loss(emit: Emit, node: fx.Node) -> fx.Node | None:
    """A mean of the samples' losses is their sum, divided by the count of the whole batch."""
    summed = _summed(emit, node, node.args)
    return summed and emit(aten.div.Tensor, summed, _num_samples(node.args[0]))


def _multilabel_loss(emit: Emit, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    both = _summed(emit, node, node.args)
    if both is None:
        return None
    total, marks = (emit(operator.getitem, both, i) for i in (0, 1))
    return emit(aten.div.Tensor, total, _num_samples(node.args[0])), marks


def _margin_loss_backward(emit: Emit, node: fx.Node) -> fx.Node | None:
    grad, x, *rest = node.args
    if not _is_mean(node):
        return None
    share = emit(aten.div.Tensor, grad, _num_samples(x))
    return _summed(emit, node, (share, x, *rest))


def _num_samples(x: Any) -> float:
    return float(math.prod(shape_list(x)[:-1]))


def _reduction_at(node: fx.Node) -> int:
    names = [a.name for a in schema_of(node.target).arguments]
    return names.index("reduction")


def _is_mean(node: fx.Node) -> bool:
    at, given = _reduction_at(node), len(node.args)
    how: Any = node.args[at] if given > at else 1
    return how == 1


def _summed(emit: Emit, node: fx.Node, args: Any) -> fx.Node | None:
    """The loss, or its gradient, of `args` as a sum; None if it is not a mean."""
    if not _is_mean(node):
        return None
    defaults = [a.default_value for a in schema_of(node.target).arguments]
    full = [*args, *defaults[len(args) :]]
    full[_reduction_at(node)] = 2
    return emit(node.target, *full)


COMPOUNDS: dict[Any, Rewrite] = {
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dtype: _norm,
    aten.norm.ScalarOpt_dim_dtype: _norm,
    aten.renorm.default: _renorm,
    aten.nansum.default: _nansum,
    aten.std_mean.correction: _std_mean,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.rot90.default: _rot90,
    aten.baddbmm.default: _baddbmm,
    aten.addbmm.default: _addbmm,
    aten.addr.default: _addr,
    aten.trace.default: _trace,
    aten.block_diag.default: _block_diag,
    aten.take.default: _take,
    aten.put.default: _put,
    aten.multi_margin_loss.default: _margin_loss,
    aten.multi_margin_loss_backward.default: _margin_loss_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel_loss,
    aten.multilabel_margin_loss_backward.default: _margin_loss_backward,
}
