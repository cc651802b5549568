"""Slices, concatenation and padding along one dim: that dim stays whole, the others split.

`follows` pairs a factor of the operand with one of the result: a slice of a split dim should be split the
same way, though the slice itself needs the whole dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.rules.rule import Rule, Term, groups, operands_of, shape, whole_dims

aten = torch.ops.aten
_ONE = groups((0,))


def _dim(node: fx.Node, position: int, default: int = 0) -> int:
    rank = len(shape(operands_of(node)[0]))
    dim: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    return dim % rank


def _cut(position: int, drop: bool):
    """slice and select: `drop` when the dim disappears."""

    def rule(node: fx.Node) -> Rule:
        dim, x = _dim(node, position), shape(node.args[0])
        operand: Term = tuple((f"d{i}",) for i in range(len(x)))
        result: Term = tuple(
            ("cut",) if i == dim else (f"d{i}",) for i in range(len(x)) if not (drop and i == dim)
        )
        sizes = {f"d{i}": n for i, n in enumerate(x)}
        follows: tuple[tuple[str, str], ...] = ()
        if not drop:
            sizes["cut"] = shape(node)[dim]
            follows = ((f"d{dim}", "cut"),)
        whole = frozenset({f"d{dim}", "cut"} & set(sizes))
        return Rule(
            (operand,), (result,), sizes, whole, linear=_ONE, structural=True, follows=follows
        )

    return rule


def _cut_backward(drop: bool):
    """slice_backward and select_backward write a gradient into zeros of the shape in argument 1."""

    def rule(node: fx.Node) -> Rule:
        out = shape(node)
        dim: Any = node.args[2]
        dim %= len(out)
        result: Term = tuple((f"d{i}",) for i in range(len(out)))
        operand: Term = tuple(
            ("cut",) if i == dim else (f"d{i}",) for i in range(len(out)) if not (drop and i == dim)
        )
        sizes = {f"d{i}": n for i, n in enumerate(out)}
        if not drop:
            sizes["cut"] = shape(node.args[0])[dim]
        whole = frozenset({f"d{dim}", "cut"} & set(sizes))
        follows = () if drop else (("cut", f"d{dim}"),)
        return Rule(
            (operand,),
            (result,),
            sizes,
            whole,
            linear=_ONE,
            shape_argument=1,
            follows=follows,
        )

    return rule


def _scatter_cut(drop: bool):
    def rule(node: fx.Node) -> Rule:
        args: Any = node.args
        x = shape(args[0])
        dim: Any = args[2] if len(args) > 2 else node.kwargs.get("dim", 0)
        dim %= len(x)
        base: Term = tuple((f"d{i}",) for i in range(len(x)))
        source: Term = tuple(
            ("cut",) if i == dim else (f"d{i}",) for i in range(len(x)) if not (drop and i == dim)
        )
        sizes = {f"d{i}": n for i, n in enumerate(x)}
        if not drop:
            sizes["cut"] = shape(args[1])[dim]
        whole = frozenset({f"d{dim}", "cut"} & set(sizes))
        return Rule((base, source), (base,), sizes, whole, linear=groups((0, 1)))

    return rule


def _cat(node: fx.Node) -> Rule:
    operands = operands_of(node)
    out = shape(node)
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim %= len(out)
    terms: list[Term] = []
    sizes = {f"d{i}": n for i, n in enumerate(out)}
    for k, x in enumerate(operands):
        if len(shape(x)) != len(out):
            terms.append(((),) * len(shape(x)))
            continue
        terms.append(tuple((f"p{k}",) if i == dim else (f"d{i}",) for i in range(len(out))))
        sizes[f"p{k}"] = shape(x)[dim]
    whole = {f"d{dim}", *(f"p{k}" for k in range(len(operands)))} & set(sizes)
    result = tuple((f"d{i}",) for i in range(len(out)))
    follows = tuple((f"p{k}", f"d{dim}") for k in range(len(operands)) if f"p{k}" in sizes)
    return Rule(
        tuple(terms),
        (result,),
        sizes,
        frozenset(whole),
        linear=groups(range(len(operands))),
        structural=True,
        follows=follows,
    )


def _stack(node: fx.Node) -> Rule:
    operands = operands_of(node)
    out = shape(node)
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim %= len(out)
    result: Term = tuple(() if i == dim else (f"d{i}",) for i in range(len(out)))
    operand: Term = tuple((f"d{i}",) for i in range(len(out)) if i != dim)
    sizes = {f"d{i}": n for i, n in enumerate(out) if i != dim}
    return Rule(
        (operand,) * len(operands),
        (result,),
        sizes,
        linear=groups(range(len(operands))),
        structural=True,
    )


def _pad(node: fx.Node) -> Rule:
    x = shape(node.args[0])
    pad: Any = node.args[1]
    padded = {len(x) - 1 - k for k in range(len(pad) // 2) if pad[2 * k] or pad[2 * k + 1]}
    operand: Term = tuple((f"d{i}",) for i in range(len(x)))
    result: Term = tuple((f"o{i}",) if i in padded else (f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x)} | {f"o{i}": shape(node)[i] for i in padded}
    whole = frozenset({f"d{i}" for i in padded} | {f"o{i}" for i in padded})
    zero = len(node.args) < 3 or node.args[2] == 0
    follows = tuple((f"d{i}", f"o{i}") for i in sorted(padded))
    return Rule((operand,), (result,), sizes, whole, linear=_ONE if zero else (), follows=follows)


def _triangle(node: fx.Node) -> Rule:
    x = shape(node.args[0])
    term: Term = tuple((f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x)}
    whole = frozenset({f"d{len(x) - 2}", f"d{len(x) - 1}"})
    return Rule((term,), (term,), sizes, whole, linear=_ONE)


def _frame(node: fx.Node) -> Rule:
    """Padding by reflection or repetition, and its gradient: each sample and channel by itself."""
    operands = [shape(x) for x in operands_of(node)]
    pad: Any = node.args[len(operands)]
    lead = len(operands[0]) - len(pad) // 2
    term: Term = tuple((f"d{i}",) if i < lead else () for i in range(len(operands[0])))
    sizes = {f"d{i}": n for i, n in enumerate(operands[0][:lead])}
    return Rule((term,) * len(operands), (term,), sizes, linear=_ONE)


def _unfold(node: fx.Node) -> Rule:
    """Windows along one dim: it stays whole, and so do the windows."""
    x = shape(node.args[0])
    dim: Any = node.args[1]
    whole = whole_dims([dim], x)
    operand: Term = tuple((f"d{i}",) for i in range(len(x)))
    result: Term = (*(() if f"d{i}" in whole else (f"d{i}",) for i in range(len(x))), ())
    sizes = {f"d{i}": n for i, n in enumerate(x)}
    return Rule((operand,), (result,), sizes, whole, linear=_ONE, structural=True)


def _unfold_backward(node: fx.Node) -> Rule:
    out = shape(node)
    dim: Any = node.args[2]
    whole = whole_dims([dim], out)
    term: Term = tuple(() if f"d{i}" in whole else (f"d{i}",) for i in range(len(out)))
    sizes = {f"d{i}": n for i, n in enumerate(out) if f"d{i}" not in whole}
    return Rule(((*term, ()),), (term,), sizes, linear=_ONE, shape_argument=1)


RULES = {
    aten.slice.Tensor: _cut(1, drop=False),
    aten.select.int: _cut(1, drop=True),
    aten.slice_backward.default: _cut_backward(drop=False),
    aten.select_backward.default: _cut_backward(drop=True),
    aten.slice_scatter.default: _scatter_cut(drop=False),
    aten.select_scatter.default: _scatter_cut(drop=True),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _pad,
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    aten.unfold.default: _unfold,
    aten.unfold_backward.default: _unfold_backward,
    aten.reflection_pad1d.default: _frame,
    aten.reflection_pad1d_backward.default: _frame,
    aten.reflection_pad2d.default: _frame,
    aten.reflection_pad2d_backward.default: _frame,
    aten.replication_pad1d.default: _frame,
    aten.replication_pad1d_backward.default: _frame,
    aten.replication_pad2d.default: _frame,
    aten.replication_pad2d_backward.default: _frame,
    aten.reflection_pad3d.default: _frame,
    aten.reflection_pad3d_backward.default: _frame,
    aten.replication_pad3d.default: _frame,
    aten.replication_pad3d_backward.default: _frame,
}
