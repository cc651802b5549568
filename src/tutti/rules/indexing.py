"""Looking up along one dim: that dim stays whole (or is split by a special part), the others split."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.rules.parts import embedding_backward_part, embedding_part
from tutti.rules.rule import Factors, Rule, Term, groups, operands_of, parse_rule, shape

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
    """x[i, j, ...]: dims that are looked up stay whole; the others, and the indices' own dims, split."""
    x, out = shape(node.args[0]), shape(node)
    indices: Any = list(node.args[1])  # type: ignore[arg-type]
    indices += [None] * (len(x) - len(indices))
    used = [d for d, i in enumerate(indices) if i is not None]
    if any(i.meta["val"].dtype == torch.bool for i in indices if i is not None):
        return None
    contiguous = used == list(range(used[0], used[-1] + 1))
    common = torch.broadcast_shapes(*(shape(indices[d]) for d in used))
    first = used[0] if contiguous else 0
    sizes = {f"d{i}": n for i, n in enumerate(x)} | {f"i{k}": n for k, n in enumerate(common)}
    rest: list[Factors] = [(f"d{d}",) for d in range(len(x)) if d not in used]
    looked: list[Factors] = [(f"i{k}",) for k in range(len(common))]
    result = tuple(rest[:first] + looked + rest[first:])
    assert len(result) == len(out)
    terms: list[Term] = [tuple((f"d{d}",) for d in range(len(x)))]
    for d in used:
        dims = shape(indices[d])
        lead = len(common) - len(dims)
        terms.append(
            tuple((f"i{lead + k}",) if n == common[lead + k] else () for k, n in enumerate(dims))
        )
    whole = frozenset(f"d{d}" for d in used)
    return Rule(tuple(terms), (result,), sizes, whole, linear=_ONE)


def _index_put(node: fx.Node) -> Rule | None:
    """Dims after the looked-up ones split when the indices cover a leading run of dims."""
    x, values = shape(node.args[0]), shape(node.args[2])
    indices: Any = list(node.args[1])  # type: ignore[arg-type]
    used = [d for d, i in enumerate(indices) if i is not None]
    if len(used) == 1 and indices[0] is not None and indices[0].meta["val"].dtype == torch.bool:
        return _masked_put(x, shape(indices[0]), values)
    if used != list(range(len(used))) or any(
        i.meta["val"].dtype == torch.bool for i in indices if i is not None
    ):
        return None
    common = torch.broadcast_shapes(*(shape(indices[d]) for d in used))
    base: Term = tuple((f"d{d}",) for d in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x)}
    full = (*common, *x[len(used) :])
    lead = len(full) - len(values)
    value: Term = tuple(
        (f"d{lead + i - len(common) + len(used)}",)
        if lead + i >= len(common) and n == full[lead + i]
        else ()
        for i, n in enumerate(values)
    )
    terms: list[Term] = [base, *(((),) * len(shape(indices[d])) for d in used), value]
    whole = frozenset(f"d{d}" for d in used)
    accumulate = len(node.args) > 3 and bool(node.args[3])
    linear = groups((0, len(terms) - 1)) if accumulate else ()
    return Rule(tuple(terms), (base,), sizes, whole, linear=linear)


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
    dim %= len(x)
    operand: Term = tuple((f"d{i}",) for i in range(len(x)))
    result: Term = tuple(("i",) if i == dim else (f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x)} | {"i": shape(node)[dim]}
    return Rule((operand, (("i",),)), (result,), sizes, frozenset({f"d{dim}"}), linear=_ONE)


def _index_into(linear: tuple[tuple[int, ...], ...] = ()):
    """index_add(x, dim, index, source) and the like: the dim and the index stay whole."""

    def rule(node: fx.Node) -> Rule:
        x, operands = shape(node.args[0]), operands_of(node)
        dim: Any = node.args[1]
        dim %= len(x)
        base: Term = tuple((f"d{i}",) for i in range(len(x)))
        sizes = {f"d{i}": n for i, n in enumerate(x)}
        terms: list[Term] = [base, ((),) * len(shape(operands[1]))]
        if len(operands) > 2:
            same = len(shape(operands[2])) == len(x)
            term = tuple(() if i == dim else (f"d{i}",) for i in range(len(x)))
            terms.append(term if same else ((),) * len(shape(operands[2])))
            if not same:
                return Rule(tuple(terms), (base,), sizes, frozenset(sizes))
        return Rule(tuple(terms), (base,), sizes, frozenset({f"d{dim}"}), linear=groups(*linear))

    return rule


def _search(line: int):
    """Each value is looked up by itself in a row that every rank holds; the row is operand `line`."""

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
    """arange and the like: worked out whole on every rank, then cut, which moves nothing."""
    out = shape(node)
    term: Term = tuple((f"d{i}",) for i in range(len(out)))
    sizes = {f"d{i}": n for i, n in enumerate(out)}
    return Rule(((),) * len(operands_of(node)), (term,), sizes, frozenset(sizes))


RULES = {
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
    aten.bucketize.Tensor: _search(1),
    aten.searchsorted.Tensor: _search(0),
    aten.arange.default: _line,
    aten.arange.start: _line,
    aten.arange.start_step: _line,
    aten.linspace.default: _line,
    aten.eye.default: _line,
    aten.eye.m: _line,
}
