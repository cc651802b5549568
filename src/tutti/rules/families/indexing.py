"""Lookups along one dim: that dim stays whole (or a function of `parts` splits it), the others split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tutti.graph.analysis.lookup import IndexLookup
from tutti.graph.ops.checked_ids import from_start
from tutti.rules.families.part_ops import embedding_backward_part, embedding_part
from tutti.rules.rule import (
    Factors,
    Rule,
    Term,
    broadcast_rule,
    groups,
    operands_of,
    parse_rule,
    shape,
    whole_dims,
)

aten = torch.ops.aten
_ONE = groups((0,))


def _embedding(node: fx.Node) -> Rule:
    weight, index = (shape(x) for x in operands_of(node))
    rows = " ".join(f"i{k}" for k in range(len(index)))
    rule = parse_rule(f"v d, {rows} -> {rows} d", [weight, index], [shape(node)], linear=_ONE)
    rule.parts["v"] = embedding_part
    return rule


def _embedding_backward(node: fx.Node) -> Rule:
    grad, index = (shape(x) for x in operands_of(node))
    rows = " ".join(f"i{k}" for k in range(len(index)))
    frequency = bool(node.args[4])
    v = "v!" if frequency else "v"
    if frequency:
        rows = " ".join(f"i{k}!" for k in range(len(index)))
    rule = parse_rule(f"{rows} d, {rows} -> {v} d", [grad, index], [shape(node)], linear=_ONE)
    if not frequency:
        rule.parts["v"] = embedding_backward_part
    return rule


def _index(node: fx.Node) -> Rule | None:
    """x[i, j, ...]: dims with an index stay whole; the others, and the indices' own dims, split."""
    lookup = IndexLookup.of(node)
    if lookup is None:
        return None
    terms, result, sizes = _looked_up(lookup)
    whole = frozenset(f"d{d}" for d in lookup.used)
    return Rule(tuple(terms), (result,), sizes, whole, linear=_ONE)


def _looked_up(lookup: IndexLookup) -> tuple[list[Term], Term, dict[str, int]]:
    """The terms of x and of each index, the term of the result, and the factors' sizes."""
    sizes = {f"d{d}": n for d, n in enumerate(lookup.x)}
    sizes |= {f"i{k}": n for k, n in enumerate(lookup.common)}
    rest: list[Factors] = [(f"d{d}",) for d in lookup.rest]
    common: list[Factors] = [(f"i{k}",) for k in range(len(lookup.common))]
    terms: list[Term] = [tuple((f"d{d}",) for d in range(len(lookup.x)))]
    for d in lookup.used:
        terms.append(_aligned_right(lookup.shape_of(d), common, sizes))
    return terms, (*rest[: lookup.first], *common, *rest[lookup.first :]), sizes


def _aligned_right(dims: tuple[int, ...], term: Sequence[Factors], sizes: dict[str, int]) -> Term:
    """The factors of dims that broadcast to those of `term`."""
    factors = term[len(term) - len(dims) :]
    return tuple(f if sizes[f[0]] == n else () for f, n in zip(factors, dims, strict=True))


def _index_put(node: fx.Node) -> Rule | None:
    """x[i, j, ...] = values: the dims without an index split, in the values too."""
    x, values = shape(node.args[0]), shape(node.args[2])
    lookup = IndexLookup.of(node)
    if lookup is None:
        indices: Any = list(node.args[1])  # type: ignore[arg-type]
        return _masked_put(x, shape(indices[0]), values) if len(indices) == 1 else None
    terms, found, sizes = _looked_up(lookup)
    terms.append(_aligned_right(values, found, sizes))
    whole = frozenset(sizes) - {f"d{d}" for d in lookup.rest}
    adding = len(node.args) > 3 and bool(node.args[3])
    linear = groups((0, len(terms) - 1)) if adding else ()
    return Rule(tuple(terms), (terms[0],), sizes, whole, linear=linear)


def _masked_put(x: tuple[int, ...], mask: tuple[int, ...], values: tuple[int, ...]) -> Rule | None:
    """x[mask] = number: each element by itself."""
    if max(values, default=1) > 1:
        return None
    base: Term = tuple((f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x)}
    return Rule((base, base[: len(mask)], ((),) * len(values)), (base,), sizes)


def _lookup(node: fx.Node) -> Rule:
    """gather(x, dim, index): only dims of equal size in both split."""
    x, index = shape(node.args[0]), shape(node.args[2])
    dim: Any = node.args[1]
    return _aligned(node, [x, index], index, dim % max(len(x), 1), groups((0,)))


def _scatter(linear: tuple[tuple[int, ...], ...] = ()):
    """scatter(x, dim, index, ...): dims of equal size in all of them split."""

    def rule(node: fx.Node) -> Rule:
        x = shape(node.args[0])
        dim: Any = node.args[1]
        shapes = [shape(o) for o in operands_of(node)]
        return _aligned(node, shapes, x, dim % max(len(x), 1), groups(*linear))

    return rule


def _aligned(
    node: fx.Node, shapes: list[tuple[int, ...]], out: tuple[int, ...], dim: int, linear: Any
) -> Rule:
    same = [
        i != dim and all(len(s) == len(out) and s[i] == out[i] for s in shapes)
        for i in range(len(out))
    ]
    term: Term = tuple((f"d{i}",) if ok else () for i, ok in enumerate(same))
    sizes = {f"d{i}": out[i] for i, ok in enumerate(same) if ok}
    terms = tuple(term if len(s) == len(out) else ((),) * len(s) for s in shapes)
    return Rule(terms, (term,), sizes, linear=linear)


def _index_select(node: fx.Node) -> Rule:
    x = shape(node.args[0])
    dim: Any = node.args[1]
    index: Term = (("i",),) * len(shape(node.args[2]))
    whole = whole_dims([dim], x)
    operand: Term = tuple((f"d{i}",) for i in range(len(x)))
    result: Term = tuple(("i",) if f"d{i}" in whole else (f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x)} | {"i": math.prod(shape(node.args[2]))}
    whole |= frozenset() if x else {"i"}  # of a single number
    return Rule((operand, index), (result,), sizes, whole, linear=_ONE)


def _index_into(linear: tuple[tuple[int, ...], ...] = ()):
    """index_add(x, dim, index, source) and the like: the dim and the index stay whole."""

    def rule(node: fx.Node) -> Rule:
        x, operands = shape(node.args[0]), operands_of(node)
        dim: Any = node.args[1]
        along = whole_dims([dim], x)
        base: Term = tuple((f"d{i}",) for i in range(len(x)))
        sizes = {f"d{i}": n for i, n in enumerate(x)}
        index = shape(operands[1])
        terms: list[Term] = [base, (("i",),) * len(index)]
        whole = along | {"i"}
        if len(operands) > 2:
            same = len(shape(operands[2])) == len(x)
            term = tuple(("i",) if f"d{i}" in along else (f"d{i}",) for i in range(len(x)))
            terms.append(term if same else ((),) * len(shape(operands[2])))
            if not same:
                whole = frozenset(sizes) | {"i"}
        sizes |= {"i": index[0]} if index else {}
        return Rule(tuple(terms), (base,), sizes, whole, linear=groups(*linear))

    return rule


def _index_fill(node: fx.Node) -> Rule:
    """One number, equal on all ranks, at every position of the index along the dim."""
    x, index, _ = (shape(o) for o in operands_of(node))
    dim: Any = node.args[1]
    base: Term = tuple((f"d{i}",) for i in range(len(x)))
    whole = whole_dims([dim], x)
    sizes = {f"d{i}": n for i, n in enumerate(x)}
    terms = (base, ((),) * len(index), ())
    return Rule(terms, (base,), sizes, whole, linear=groups((0, 2)))


def _search(line: int):
    """A search of each value in a row that every rank holds; the row is operand `line`."""

    def rule(node: fx.Node) -> Rule | None:
        operands = [shape(x) for x in operands_of(node)]
        if len(operands[line]) != 1 or len(operands) > 2:
            return None
        values = operands[1 - line]
        term: Term = tuple((f"d{i}",) for i in range(len(values)))
        terms = (((),), term) if line == 0 else (term, ((),))
        return Rule(terms, (term,), {f"d{i}": n for i, n in enumerate(values)})

    return rule


def _line(node: fx.Node) -> Rule:
    """arange and the like: every rank computes the whole and keeps its part, without communication."""
    out = shape(node)
    term: Term = tuple((f"d{i}",) for i in range(len(out)))
    sizes = {f"d{i}": n for i, n in enumerate(out)}
    return Rule(((),) * len(operands_of(node)), (term,), sizes, frozenset(sizes))


def _ids(node: fx.Node) -> Rule:
    """Each id by itself."""
    return broadcast_rule([shape(node.args[0])], shape(node))


def _nonzero_static(node: fx.Node) -> Rule:
    """Positions of one tensor, in order: it stays whole."""
    x = shape(node.args[0])
    dims = " ".join(f"d{k}!" for k in range(len(x)))
    return parse_rule(f"{dims} -> places! positions!", [x], [shape(node)])


RULES = {
    from_start: _ids,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.gather.default: _lookup,
    aten.scatter.src: _scatter(),
    aten.scatter.value: _scatter(),
    aten.scatter_add.default: _scatter(((0, 2),)),
    aten.scatter_reduce.two: _scatter(),
    aten.index_select.default: _index_select,
    aten.index_add.default: _index_into(((0, 2),)),
    aten.index_copy.default: _index_into(((0, 2),)),
    aten.index_fill.int_Scalar: _index_into(),
    aten.index_fill.int_Tensor: _index_fill,
    aten.bucketize.Tensor: _search(1),
    aten.searchsorted.Tensor: _search(0),
    aten.nonzero_static.default: _nonzero_static,
    aten.arange.default: _line,
    aten.arange.start: _line,
    aten.arange.start_step: _line,
    aten.linspace.default: _line,
    aten.eye.default: _line,
    aten.eye.m: _line,
}
