"""Local code for the split of a factor where the plain op on local tensors would be wrong.

Each function takes a `LocalCall`: the call with its local operands in place, a way to emit local nodes, and
the global positions that this rank holds along a dim.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import fx

from tutti.graph.ops.checked_ids import near
from tutti.rules.rule import operands_of, shape

aten = torch.ops.aten


class LocalCall(Protocol):
    """One call on local tensors."""

    node: fx.Node
    args: list[Any]
    kwargs: dict[str, Any]

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the local graph."""
        ...

    def positions(self, operand: int, dim: int) -> fx.Node:
        """The global indices that this rank holds along `dim` of the operand, int64, 1-D."""
        ...

    def result_shape(self) -> list[int]:
        """The shape of this rank's part of the (first) result."""
        ...


def own_rows(
    part: LocalCall,
    index: Any,
    positions: fx.Node,
    size: int | None = None,
    ignored: int | None = None,
) -> tuple[fx.Node, fx.Node]:
    """`index` counted within this rank's rows, and the mask of indices in them.

    With `size`, the number of rows of all ranks, an index outside of it is an error of the call, unless it is
    `ignored`. A rank's rows ascend but need not be contiguous: a view may merge a dim whose minor part is
    split.
    """
    local = part.emit(near, positions, index, size, ignored)
    found = part.emit(aten.index.Tensor, positions, [local])
    return local, part.emit(aten.eq.Tensor, found, index)


def _size(x: Any, dim: int) -> int:
    return int(x.meta["val"].shape[dim])


def embedding_part(part: LocalCall) -> fx.Node:
    """Zeros for rows of other ranks; the sum over ranks has every row."""
    weight, index = part.args[:2]
    size = shape(operands_of(part.node)[0])[0]
    local, inside = own_rows(part, index, part.positions(0, 0), size)
    rows = part.emit(aten.embedding.default, weight, local)
    return _zeros_outside(part, rows, inside)


def _zeros_outside(part: LocalCall, rows: Any, inside: Any) -> fx.Node:
    """`rows` with zeros for those not `inside`, whatever these hold."""
    return part.emit(
        aten.where.ScalarOther, part.emit(aten.unsqueeze.default, inside, -1), rows, 0.0
    )


def embedding_backward_part(part: LocalCall) -> fx.Node:
    """Drops the gradients of other ranks' rows."""
    grad, index, size, padding, by_frequency = part.args
    assert not by_frequency
    positions = part.positions(-1, 0)
    local, inside = own_rows(part, index, positions, size)
    if padding >= 0:
        inside = part.emit(
            aten.bitwise_and.Tensor, inside, part.emit(aten.ne.Scalar, index, padding)
        )
    kept = _zeros_outside(part, grad, inside)
    num_local = _size(positions, 0)
    return part.emit(aten.embedding_dense_backward.default, kept, local, num_local, -1, False)


def _own_target(part: LocalCall, target: Any, operand: int, ignore: int) -> fx.Node:
    """Targets among this rank's classes, counted within them; -100 for all others."""
    size = shape(operands_of(part.node)[operand])[1]
    local, inside = own_rows(part, target, part.positions(operand, 1), size, ignore)
    valid = part.emit(aten.bitwise_and.Tensor, inside, part.emit(aten.ne.Scalar, target, ignore))
    none = part.emit(aten.full_like.default, local, -100)
    return part.emit(aten.where.self, valid, local, none)


def nll_forward_part(part: LocalCall) -> fx.Node:
    """Each rank sums the tokens whose class it holds."""
    logp, target, _, _, ignore = part.args
    own = _own_target(part, target, 0, ignore)
    return part.emit(part.node.target, logp, own, None, 2, -100)


def nll_backward_part(part: LocalCall) -> fx.Node:
    """Each rank writes the gradient of the classes that it holds."""
    grad, logp, target, _, reduction, ignore, total = part.args
    own = _own_target(part, target, 1, ignore)
    return part.emit(part.node.target, grad, logp, own, None, reduction, -100, total)


def _causal_bias(part: LocalCall, query: Any, num_keys: int, operand: int) -> fx.Node:
    """0 for keys up to the query's global position, -inf after it; (queries, keys)."""
    device = query.meta["val"].device
    dtype = query.meta["val"].dtype
    rows = part.emit(aten.unsqueeze.default, part.positions(operand, 2), 1)
    keys = part.emit(aten.arange.default, num_keys, device=device)
    later = part.emit(aten.gt.Tensor, keys, rows)
    zeros = part.emit(
        aten.full.default, [_size(rows, 0), num_keys], 0.0, dtype=dtype, device=device
    )
    return part.emit(aten.masked_fill.Scalar, zeros, later, float("-inf"))


def causal_forward_part(part: LocalCall) -> fx.Node:
    """A block of queries at its global position: the causal triangle becomes an explicit bias."""
    query, key, value = part.args[:3]
    dropout, causal = (list(part.args[3:]) + [0.0, False][len(part.args) - 3 :])[:2]
    kwargs = dict(part.kwargs)
    if causal:
        kwargs["attn_mask"] = _causal_bias(part, query, _size(key, 2), 0)
    return part.emit(part.node.target, query, key, value, dropout, False, **kwargs)


def causal_backward_part(part: LocalCall) -> fx.Node:
    """As forward, with the same bias."""
    grad, query, key, value, out, lse, dropout, causal = part.args
    kwargs = dict(part.kwargs)
    if causal:
        kwargs["attn_mask"] = _causal_bias(part, query, _size(key, 2), 1)
    return part.emit(part.node.target, grad, query, key, value, out, lse, dropout, False, **kwargs)
