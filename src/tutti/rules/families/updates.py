"""Fused optimizer updates: element by element over a parameter, its gradient and its slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from tutti.graph.ops.fused_updates import BY_OP
from tutti.rules.rule import Rule, Term, shape


def _update(node: fx.Node) -> Rule:
    """A factor for each dim of each parameter; step counts have none.

    No new value depends on the split of another parameter, so none is ever pending.
    """
    kernel, lists = BY_OP[node.target], node.args
    terms: list[list[Term]] = [[_term(x, i) for i, x in enumerate(xs)] for xs in _nodes(lists)]
    operands = [t for xs in terms for t in xs]
    results = [t for k in kernel.written for t in terms[k]]
    sizes = {
        f: int(n)
        for x, term in zip(_nodes(lists)[0], terms[0], strict=True)
        for n, dim in zip(shape(x), term, strict=True)
        for f in dim
    }
    apart = frozenset(range(len(results)))
    return Rule(tuple(operands), tuple(results), sizes, apart=apart)


def _nodes(lists: Sequence[Any]) -> list[list[fx.Node]]:
    return [list(xs) for xs in lists]


def _term(x: fx.Node, index: int) -> Term:
    """Factors `a0`, `a1`, ... for the first parameter, `b0`, `b1`, ... for the second."""
    letter = chr(ord("a") + index) if index < 26 else f"p{index}_"
    return tuple(() if n == 1 else (f"{letter}{d}",) for d, n in enumerate(shape(x)))


RULES = dict.fromkeys(BY_OP, _update)
