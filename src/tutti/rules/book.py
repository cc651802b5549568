"""Rules looked up by call: calls that are alike, as those of repeated layers are, share one rule."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from tutti.rules.rule import Rule
from tutti.rules.table import rule_of


class Book:
    """The rules of the calls of one graph, each worked out once for all calls that are alike.

    That two calls have the *same* rule says that what follows from rule and shardings is the same too:
    op, shapes, dtypes, constants, and which operands are one value.
    """

    def __init__(self) -> None:
        self._by_node: dict[fx.Node, Rule | None] = {}
        self._by_call: dict[object, Rule | None] = {}

    def of(self, node: fx.Node) -> Rule | None:
        """The rule of a call, or None where there is none."""
        if node not in self._by_node:
            key = call_of(node)
            if key not in self._by_call:
                self._by_call[key] = rule_of(node)
            self._by_node[node] = self._by_call[key]
        return self._by_node[node]

    @property
    def num_rules(self) -> int:
        """How many rules were worked out."""
        return len(self._by_call)


def call_of(node: fx.Node) -> object:
    """All of a call that its rule may depend on, equal for calls that are alike."""
    numbers: dict[fx.Node, int] = {}

    def key(x: Any) -> object:
        if isinstance(x, fx.Node):
            return (numbers.setdefault(x, len(numbers)), _type_of(x.meta["val"]))
        if isinstance(x, list | tuple):
            return tuple(map(key, x))
        if isinstance(x, dict):
            return tuple((k, key(y)) for k, y in x.items())
        return (type(x), x)  # 1, 1.0 and True are equal

    return node.target, key(node.args), key(node.kwargs), _type_of(node.meta["val"])


def _type_of(val: Any) -> object:
    if isinstance(val, Tensor):
        return tuple(val.shape), val.dtype
    return tuple(map(_type_of, val)) if isinstance(val, list | tuple) else type(val)
