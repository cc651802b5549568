"""Products that sum over a shared factor, and distances of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tutti.rules.rule import Rule, Term, broadcast_rule, groups, operands_of, shape, spelled

aten = torch.ops.aten
BILINEAR = groups((0,), (1,))


def _contraction(text: str):
    return spelled(text, linear=BILINEAR)


def _addmm(node: fx.Node) -> Rule:
    """bias + a @ b: the shared factor stays whole, else each rank would add the bias."""
    bias, a, _ = (shape(x) for x in operands_of(node))
    m, n = shape(node)
    term = tuple(
        (f,) if size == full and size != 1 else ()
        for f, size, full in zip(
            ("m", "n")[2 - len(bias) :], bias, (m, n)[2 - len(bias) :], strict=True
        )
    )
    return Rule(
        (term, (("m",), ("k",)), (("k",), ("n",))),
        ((("m",), ("n",)),),
        {"m": m, "n": n, "k": a[1]},
        frozenset({"k"}),
    )


def _addmv(node: fx.Node) -> Rule:
    """bias + a @ v, as with `addmm`."""
    bias, a, _ = (shape(x) for x in operands_of(node))
    term = tuple(("m",) if size == a[0] and size != 1 else () for size in bias)
    terms = (term, (("m",), ("k",)), (("k",),))
    return Rule(terms, ((("m",),),), {"m": a[0], "k": a[1]}, frozenset({"k"}))


def _cross(node: fx.Node) -> Rule:
    """Vectors of three along one dim, which stays whole."""
    dim: Any = node.kwargs.get("dim", -1)
    dim %= len(shape(node))
    rule = broadcast_rule([shape(x) for x in operands_of(node)], shape(node), linear=BILINEAR)
    return replace(rule, whole=frozenset({f"d{dim}"}))


def _trilinear(node: fx.Node) -> Rule:
    """The product of three tensors, each with dims of 1 inserted at its list, summed over a list of dims."""
    given: Any = node.args
    operands, inserted, summed = [shape(x) for x in given[:3]], given[3:6], given[6]
    rank = len(operands[0]) + len(inserted[0])
    sizes: dict[str, int] = {}
    terms: list[Term] = []
    for dims, new in zip(operands, inserted, strict=True):
        places = [d for d in range(rank) if d not in new]
        sizes |= {f"d{d}": n for d, n in zip(places, dims, strict=True) if n != 1}
        terms.append(tuple((f"d{d}",) if n != 1 else () for d, n in zip(places, dims, strict=True)))
    full: Term = tuple((f"d{d}",) if f"d{d}" in sizes else () for d in range(rank))
    result = tuple(t for d, t in enumerate(full) if d not in summed)
    return Rule(tuple(terms), (result,), sizes, linear=groups((0,), (1,), (2,)))


_DISTANCE = "... m k!, ... n k! -> ... m n"

RULES = {
    aten.mm.default: _contraction("m k, k n -> m n"),
    aten.bmm.default: _contraction("b m k, b k n -> b m n"),
    aten.mv.default: _contraction("m k, k -> m"),
    aten.dot.default: _contraction("k, k ->"),
    aten.vdot.default: _contraction("k, k ->"),
    aten._trilinear.default: _trilinear,
    aten._cdist_forward.default: _DISTANCE,
    aten._euclidean_dist.default: _DISTANCE,
    aten._cdist_backward.default: spelled(
        "... m n, ... m k, ... n k, ... m n -> ... m k", linear=groups((0,))
    ),
    aten.addmm.default: _addmm,
    aten.addmv.default: _addmv,
    aten.linalg_cross.default: _cross,
}
