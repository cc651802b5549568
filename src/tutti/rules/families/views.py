"""Ops that only move or repeat elements: the shapes give their factors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tutti.graph.ops.boundary import shard_as_op
from tutti.graph.randomness.draw import draw
from tutti.rules.rule import Factors, Rule, Term, groups, operands_of, shape, whole_dims

aten = torch.ops.aten
_ONE = groups((0,))


def reshape_factors(
    before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Term, Term, dict[str, int]]:
    """Common factors of two shapes of the same elements in the same order.

    (4, 8, 16) and (32, 16): f0=4, f1=8, f2=16 as `f0 f1 f2` and `(f0 f1) f2`.
    """
    cuts = [0, 0]
    shapes = [list(before), list(after)]
    terms: list[list[list[str]]] = [[[] for _ in before], [[] for _ in after]]
    rest = [1, 1]
    sizes: dict[str, int] = {}

    def advance(side: int) -> bool:
        while rest[side] == 1 and cuts[side] < len(shapes[side]):
            rest[side] = shapes[side][cuts[side]]
            cuts[side] += 1
        return rest[side] > 1

    while advance(0) and advance(1):
        common = math.gcd(rest[0], rest[1])
        if common == 1:
            # e.g. 3 x 4 seen as 4 x 3: no common cut here; join until the products meet
            if not _join(shapes, cuts, rest):
                break
            continue
        # a factor is cut off at the major end, so it must divide the rest
        name = f"f{len(sizes)}"
        sizes[name] = common
        for side in (0, 1):
            terms[side][cuts[side] - 1].append(name)
            rest[side] //= common
    before_term, after_term = (
        _filled(t, s, i, sizes) for i, (t, s) in enumerate(zip(terms, shapes, strict=True))
    )
    return before_term, after_term, sizes


def _join(shapes: list[list[int]], cuts: list[int], rest: list[int]) -> bool:
    """Skip to the next position with equal products of both sides; dims before it stay whole."""
    product = list(rest)
    while product[0] != product[1]:
        side = 0 if product[0] < product[1] else 1
        if cuts[side] >= len(shapes[side]):
            return False
        product[side] *= shapes[side][cuts[side]]
        cuts[side] += 1
    rest[:] = [1, 1]
    return True


def _filled(term: list[list[str]], dims: list[int], side: int, sizes: dict[str, int]) -> Term:
    """Give the rest of a dim without a common factor a factor of its own, at the minor end (`w..`, whole)."""
    for i, (factors, size) in enumerate(zip(term, dims, strict=True)):
        rest = size // max(1, math.prod(sizes[f] for f in factors))
        if rest > 1 and factors:
            factors.append(f"w{side}{i}")
            sizes[factors[-1]] = rest
    return tuple(tuple(dim) for dim in term)


def _reshape(node: fx.Node) -> Rule:
    before, after, sizes = reshape_factors(shape(node.args[0]), shape(node))
    if 0 in shape(node):
        before, after, sizes = ((),) * len(before), ((),) * len(after), {}
    whole = frozenset(f for f in sizes if f.startswith("w"))
    return Rule((before,), (after,), sizes, whole, linear=_ONE, structural=True, shape_argument=1)


def _permute(node: fx.Node) -> Rule:
    x = shape(node.args[0])
    order: Any = node.args[1]
    names = [(f"d{i}",) for i in range(len(x))]
    return Rule(
        (tuple(names),),
        (tuple(names[d] for d in order),),
        {f"d{i}": n for i, n in enumerate(x)},
        linear=_ONE,
        structural=True,
    )


def _expand(node: fx.Node) -> Rule:
    """A broadcast dim exists in the result only: its split there is free."""
    x, out = shape(node.args[0]), shape(node)
    first = len(out) - len(x)
    result = tuple((f"d{i}",) for i in range(len(out)))
    operand = tuple((f"d{first + i}",) if n == out[first + i] else () for i, n in enumerate(x))
    sizes = {f"d{i}": n for i, n in enumerate(out)}
    return Rule((operand,), (result,), sizes, linear=_ONE, structural=True, shape_argument=1)


def _create(argument: int) -> Any:
    def rule(node: fx.Node) -> Rule:
        out = shape(node)
        return Rule(
            (),
            (tuple((f"d{i}",) for i in range(len(out))),),
            {f"d{i}": n for i, n in enumerate(out)},
            shape_argument=argument,
        )

    return rule


def _draw(node: fx.Node) -> Rule:
    """Random values depend on their global index, so every dim may be split, except of a permutation."""
    whole = node.args[0] == "permutation"
    out = shape(node)
    names = tuple((f"d{i}",) for i in range(len(out)))
    sizes = {f"d{i}": n for i, n in enumerate(out)}
    return Rule((), (names,), sizes, frozenset(sizes) if whole else frozenset())


def _repeat(node: fx.Node) -> Rule:
    x, out = shape(node.args[0]), shape(node)
    first = len(out) - len(x)
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    operand: list[Factors] = []
    result: list[Factors] = []
    for i, n in enumerate(out):
        if i >= first and x[i - first] == n:
            sizes[f"d{i}"] = n
            operand.append((f"d{i}",))
            result.append((f"d{i}",))
        else:
            result.append(())
            if i >= first:
                operand.append(())
    return Rule((tuple(operand),), (tuple(result),), sizes, frozenset(whole), linear=_ONE)


def _roll(node: fx.Node) -> Rule:
    """The rolled dims stay whole; without dims the flattened tensor rolls."""
    x = shape(node.args[0])
    dims: Any = node.args[2] if len(node.args) > 2 else []
    names = tuple((f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x)}
    whole = whole_dims(dims, x) if dims else frozenset(sizes)
    return Rule((names,), (names,), sizes, whole, linear=_ONE, structural=True)


def _diagonal(backward: bool) -> Any:
    """Two dims become one, the last: both stay whole."""

    def rule(node: fx.Node) -> Rule:
        first = 2 if backward else 1
        square = shape(node) if backward else shape(node.args[0])
        given: Any = [*node.args[first:], *(0, 0, 1)[len(node.args) - first :]]
        two = {d % len(square) for d in given[1:3]}
        sizes = {f"d{i}": n for i, n in enumerate(square) if i not in two}
        full: Term = tuple(() if i in two else (f"d{i}",) for i in range(len(square)))
        short: Term = (*((f"d{i}",) for i in range(len(square)) if i not in two), ())
        if backward:
            return Rule((short,), (full,), sizes, linear=_ONE, shape_argument=1)
        return Rule((full,), (short,), sizes, linear=_ONE, structural=True)

    return rule


def _diag_embed(node: fx.Node) -> Rule:
    """One dim, the last, becomes two: all three stay whole."""
    out = shape(node)
    given: Any = [*node.args[1:], *(0, -2, -1)[len(node.args) - 1 :]]
    two = {d % len(out) for d in given[1:]}
    rest = [(f"d{i}",) for i in range(len(out)) if i not in two]
    full: Term = tuple(() if i in two else (f"d{i}",) for i in range(len(out)))
    sizes = {f"d{i}": n for i, n in enumerate(out) if i not in two}
    return Rule(((*rest, ()),), (full,), sizes, linear=_ONE)


def _diagonal_scatter(node: fx.Node) -> Rule:
    """A diagonal written into a tensor: its two dims stay whole."""
    x = shape(node.args[0])
    given: Any = [*node.args[2:], *(0, 0, 1)[len(node.args) - 2 :]]
    two = {d % len(x) for d in given[1:]}
    rest = [(f"d{i}",) for i in range(len(x)) if i not in two]
    full: Term = tuple(() if i in two else (f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x) if i not in two}
    return Rule((full, (*rest, ())), (full,), sizes, linear=groups((0, 1)))


def _pairs(node: fx.Node) -> Rule:
    """A complex number as a pair of reals in a last dim of 2, or back."""
    before, after = shape(node.args[0]), shape(node)
    names = tuple((f"d{i}",) for i in range(min(len(before), len(after))))
    sizes = {f"d{i}": n for i, n in enumerate(before[: len(names)])}
    terms = [(*names, ()) if len(s) > len(names) else names for s in (before, after)]
    return Rule((terms[0],), (terms[1],), sizes, linear=_ONE)


def _hint(node: fx.Node) -> Rule:
    x = shape(operands_of(node)[0])
    names = tuple((f"d{i}",) for i in range(len(x)))
    return Rule((names,), (names,), {f"d{i}": n for i, n in enumerate(x)}, linear=_ONE)


RULES = {
    aten.reshape.default: _reshape,
    aten.view.default: _reshape,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.roll.default: _roll,
    aten.diagonal.default: _diagonal(backward=False),
    aten.diagonal_backward.default: _diagonal(backward=True),
    aten.diag_embed.default: _diag_embed,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.view_as_real.default: _pairs,
    aten.view_as_complex.default: _pairs,
    aten.full.default: _create(0),
    draw: _draw,
    shard_as_op: _hint,
}
