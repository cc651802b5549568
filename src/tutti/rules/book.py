"""A cache of rules by call: equal calls, as in repeated layers, share one rule."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from tutti.rules.rule import Rule
from tutti.rules.table import rule_of


class Book:
    """The rules of the calls of one graph, each computed once for all equal calls.

    Two calls with the *same* rule have equal ops, shapes, dtypes and constants, and repeat the same operands.
    So equal shardings lead to equal results.
    """

    def __init__(self) -> None:
        self._by_node: dict[fx.Node, Rule | None] = {}
        self._by_call: dict[object, Rule | None] = {}

    def for_copy(self) -> Book:
        """A book for another copy of the graph: it shares the rules, and holds no node of the first."""
        book = Book()
        book._by_call = self._by_call
        return book

    def of(self, node: fx.Node) -> Rule | None:
        """The rule of a call, or None without one."""
        if node not in self._by_node:
            key = call_of(node)
            if key not in self._by_call:
                self._by_call[key] = rule_of(node)
            self._by_node[node] = self._by_call[key]
        return self._by_node[node]

    @property
    def num_rules(self) -> int:
        """The number of rules computed."""
        return len(self._by_call)


def call_of(node: fx.Node) -> object:
    """The key of a call: everything on which its rule may depend."""
    numbers: dict[fx.Node, int] = {}

    def key(x: Any) -> object:
        if isinstance(x, fx.Node):
            return numbers.setdefault(x, len(numbers)), _type_of(x.meta["val"])
        if isinstance(x, list | tuple):
            return tuple(map(key, x))
        if isinstance(x, dict):
            return tuple((k, key(y)) for k, y in x.items())
        return (type(x), x)  # 1, 1.0 and True are equal

    named = key(node.kwargs) if node.kwargs else ()
    return node.target, key(node.args), named, _type_of(node.meta["val"])


def _type_of(val: Any) -> object:
    if isinstance(val, Tensor):
        return tuple(val.shape), val.dtype
    return tuple(map(_type_of, val)) if isinstance(val, list | tuple) else type(val)
