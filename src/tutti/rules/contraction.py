"""Products that sum over a shared factor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tutti.rules.rule import Rule, broadcast_rule, groups, operands_of, parse_rule, shape

aten = torch.ops.aten
BILINEAR = groups((0,), (1,))


def _product(text: str):
    def rule(node: fx.Node) -> Rule:
        return parse_rule(
            text, [shape(x) for x in operands_of(node)], [shape(node)], linear=BILINEAR
        )

    return rule


def _addmm(node: fx.Node) -> Rule:
    """bias + a @ b: the shared factor stays whole, else every rank would add the bias."""
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


RULES = {
    aten.mm.default: _product("m k, k n -> m n"),
    aten.bmm.default: _product("b m k, b k n -> b m n"),
    aten.mv.default: _product("m k, k -> m"),
    aten.dot.default: _product("k, k ->"),
    aten.addmm.default: _addmm,
    aten.addmv.default: _addmv,
    aten.linalg_cross.default: _cross,
}
