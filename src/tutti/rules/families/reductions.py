"""Reductions over dims, and ops on each line along a dim by itself (softmax, sort, scan)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.graph.ops.counts import bincount
from tutti.rules.rule import (
    Rule,
    Term,
    groups,
    operands_of,
    results_of,
    shape,
    spelled,
    whole_dims,
)

aten = torch.ops.aten


def _dims(
    node: fx.Node, position: int = 1, name: str = "dim", default: int | None = None
) -> list[int]:
    dims: Any = node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
    rank = len(shape(operands_of(node)[0]))
    if dims is None or dims == []:
        return list(range(rank))
    return [d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims)]


def _reduced_terms(node: fx.Node, dims: list[int]) -> tuple[Term, Term, dict[str, int]]:
    x, out = shape(operands_of(node)[0]), results_of(node)[0]
    assert out is not None
    keep = len(out.shape) == len(x)
    operand = tuple((f"d{i}",) for i in range(len(x)))
    result = tuple(() if i in dims else (f"d{i}",) for i in range(len(x)) if keep or i not in dims)
    return operand, result, {f"d{i}": n for i, n in enumerate(x)}


def _reduce(op: str, linear: bool = False):
    def rule(node: fx.Node) -> Rule:
        operand, result, sizes = _reduced_terms(node, _dims(node))
        n = len(results_of(node))
        return Rule(
            (operand,), (result,) * n, sizes, reduce=op, linear=groups((0,)) if linear else ()
        )

    return rule


def _whole(position: int = 1, default: int | None = None):
    """The reduced dims must stay whole."""

    def rule(node: fx.Node) -> Rule:
        dims = _dims(node, position, default=default)
        operand, result, sizes = _reduced_terms(node, dims)
        whole = frozenset(f"d{i}" for i in dims)
        n = len(results_of(node))
        return Rule((operand,), (result,) * n, sizes, whole)

    return rule


def _along(position: int = 1, linear: tuple[tuple[int, ...], ...] = (), name: str = "dim"):
    """Each line along one dim by itself; shapes stay."""

    def rule(node: fx.Node) -> Rule:
        operands = operands_of(node)
        rank = len(shape(operands[0]))
        dim: Any = node.args[position] if len(node.args) > position else node.kwargs.get(name, -1)
        term = tuple((f"d{i}",) for i in range(rank))
        sizes = {f"d{i}": n for i, n in enumerate(shape(operands[0]))}
        return Rule(
            (term,) * len(operands),
            (term,) * len(results_of(node)),
            sizes,
            whole_dims([dim], shape(operands[0])),
            linear=groups(*linear),
        )

    return rule


def _topk(node: fx.Node) -> Rule:
    x = shape(node.args[0])
    dim: Any = node.args[2] if len(node.args) > 2 else -1
    whole = whole_dims([dim], x)
    operand = tuple((f"d{i}",) for i in range(len(x)))
    result = tuple(() if f"d{i}" in whole else (f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x)}
    return Rule((operand,), (result, result), sizes, whole)


def _median(node: fx.Node) -> Rule:
    """One median of all elements."""
    x = shape(node.args[0])
    names = tuple((f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x)}
    return Rule((names,), ((),), sizes, frozenset(sizes))


def _flip(node: fx.Node) -> Rule:
    x = shape(node.args[0])
    dims: Any = node.args[1]
    term = tuple((f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x)}
    whole = whole_dims(dims, x)
    return Rule((term,), (term,), sizes, whole, linear=groups((0,)), structural=True)


def _glu(position: int, linear: tuple[tuple[int, ...], ...] = ()):
    """Halves a dim of the operand; the dim stays whole in operand and result."""

    def rule(node: fx.Node) -> Rule:
        operands = [shape(x) for x in operands_of(node)]
        x, rank = operands[-1], len(operands[-1])
        dim: Any = node.args[position] if len(node.args) > position else -1
        dim %= rank
        full: Term = tuple((f"d{i}",) for i in range(rank))
        half: Term = tuple(("half",) if i == dim else (f"d{i}",) for i in range(rank))
        sizes = {f"d{i}": n for i, n in enumerate(x)} | {"half": x[dim] // 2}
        whole = frozenset({f"d{dim}", "half"})
        terms = (half, full) if len(operands) == 2 else (full,)
        result = full if len(operands) == 2 else half
        return Rule(terms, (result,), sizes, whole, linear=groups(*linear))

    return rule


def _counts(node: fx.Node) -> Rule:
    """Each value counts where it is; the counts stay whole, and pending until all are added."""
    weighted = len(operands_of(node)) > 1
    linear = groups((1,)) if weighted else ()
    return spelled("i, i -> n!" if weighted else "i -> n!", linear=linear)(node)


RULES = {
    bincount: _counts,
    aten.sum.dim_IntList: _reduce("sum", linear=True),
    aten.amax.default: _reduce("max"),
    aten.amin.default: _reduce("min"),
    aten.prod.default: _reduce("prod"),
    aten.prod.dim_int: _reduce("prod"),
    aten.any.default: _reduce("max"),
    aten.any.dim: _reduce("max"),
    aten.any.dims: _reduce("max"),
    aten.all.default: _reduce("min"),
    aten.all.dim: _reduce("min"),
    aten.all.dims: _reduce("min"),
    aten.max.default: _reduce("max"),
    aten.min.default: _reduce("min"),
    aten.max.dim: _whole(),
    aten.min.dim: _whole(),
    aten.argmax.default: _whole(),
    aten.argmin.default: _whole(),
    aten.logsumexp.default: _whole(),
    aten.linalg_vector_norm.default: _whole(position=2),
    aten.var.correction: _whole(),
    aten.var_mean.correction: _whole(),
    aten.std.correction: _whole(),
    aten.median.default: _median,
    aten.median.dim: _whole(),
    aten.kthvalue.default: _whole(2, default=-1),
    aten.mode.default: _whole(default=-1),
    aten.aminmax.default: _whole(),
    aten.count_nonzero.default: _reduce("sum"),
    aten.count_nonzero.dim_IntList: _reduce("sum"),
    aten._softmax.default: _along(),
    aten._log_softmax.default: _along(),
    aten._safe_softmax.default: _along(),
    aten._softmax_backward_data.default: _along(2, ((0,),)),
    aten._log_softmax_backward_data.default: _along(2, ((0,),)),
    aten.cumsum.default: _along(1, ((0,),)),
    aten.cumprod.default: _along(),
    aten.logcumsumexp.default: _along(),
    aten.sort.default: _along(),
    aten.sort.stable: _along(2),
    aten.argsort.default: _along(),
    aten.cummax.default: _along(),
    aten.cummin.default: _along(),
    aten.flip.default: _flip,
    aten.glu.default: _glu(1),
    aten.glu_backward.default: _glu(2, ((0,),)),
    aten.topk.default: _topk,
}
