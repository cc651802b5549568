"""Groups of dims that split together: dims of parameters joined by the factors of the ops between them.

    up [h, d]  ->  linear  ->  gelu  ->  linear  <-  down [d, h]       one group of the dims h

A split of one dim of a group follows to the others without communication, so a group is one decision.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from tutti.capture.captured import Captured
from tutti.graph.ops.expert_rows import PRODUCTS
from tutti.graph.text import op_name
from tutti.planner.placement.reduced import ReducedStep
from tutti.propagate.spread import tensors_of
from tutti.rules import Rule, is_tensor_call
from tutti.rules.book import Book
from tutti.rules.families.experts import EXPERTS
from tutti.rules.rule import Factors

# A dim of a value, or a factor of a call, and the number of blocks in it before a split: 1 for a whole dim.
Atom = tuple[object, object, int]
# A dim of a parameter.
ParameterDim = tuple[str, int]


@dataclass(frozen=True)
class DimGroup:
    """Dims of parameters that split together over one axis.

    likeness: equal for groups of equal layers.
    ops: the names of the ops that run along it.
    """

    dims: tuple[ParameterDim, ...]
    likeness: tuple[object, ...]
    ops: frozenset[str] = frozenset()

    @property
    def parameters(self) -> frozenset[str]:
        """The parameters with a dim in it."""
        return frozenset(name for name, _ in self.dims)


def dim_groups(step: ReducedStep, ways: int) -> list[DimGroup]:
    """The groups of dims that `ways` ranks can split, in the order of the parameters.

    A parameter with two dims in one group has only the first of them in it.
    """
    captured = step.captured
    joined, places = _joined(captured, ways)
    ops: dict[Atom, set[str]] = {}
    for node, factor, inner in places:
        ops.setdefault(joined.root((node, factor, inner)), set()).add(op_name(node))
    found: dict[Atom, list[ParameterDim]] = {}
    for name in step.kinds:
        node = captured.placeholders[name]
        taken: set[Atom] = set()
        for dim, size in enumerate(node.meta["val"].shape):
            root = joined.root((node, dim, 1))
            if size % ways == 0 and size > 1 and root not in taken:
                taken.add(root)
                found.setdefault(root, []).append((name, dim))
    return [
        DimGroup(tuple(dims), _likeness(captured, dims), frozenset(ops.get(root, ())))
        for root, dims in found.items()
    ]


class _Joined:
    """Sets of atoms, each with its first atom as root."""

    def __init__(self) -> None:
        self._above: dict[Atom, Atom] = {}

    def root(self, atom: Atom) -> Atom:
        while (above := self._above.get(atom, atom)) != atom:
            self._above[atom] = self._above.get(above, above)
            atom = above
        return atom

    def join(self, one: Atom, other: Atom) -> None:
        self._above[self.root(other)] = self.root(one)


def _joined(captured: Captured, ways: int) -> tuple[_Joined, list[tuple[fx.Node, str, int]]]:
    """The joined dims, and the factors of calls among them."""
    places: dict[tuple[fx.Node, str, int], None] = {}
    joined, book = _Joined(), Book()
    calls = [
        n for n in captured.graph.nodes if is_tensor_call(n) and n.target is not operator.getitem
    ]
    ruled = [(n, rule) for n in calls if (rule := book.of(n)) is not None]
    starts = _starts(ruled)
    for node, rule in ruled:
        for term, x in tensors_of(node, rule):
            for dim, factors in enumerate(term):
                for start, factor, inner in _places(factors, rule, starts, ways):
                    joined.join((x, dim, start), (node, factor, inner))
                    places[node, factor, inner] = None
        for one, other in rule.follows:
            if rule.sizes[one] % ways == 0 and rule.sizes[other] % ways == 0:
                joined.join((node, one, 1), (node, other, 1))
    _join_experts(joined, ruled)
    return joined, list(places)


def _join_experts(joined: _Joined, ruled: Sequence[tuple[fx.Node, Rule]]) -> None:
    """The experts of all products of the same rows: rows move to the ranks of their experts once."""
    first: dict[object, fx.Node] = {}
    for node, _ in ruled:
        if node.target in PRODUCTS:
            joined.join((first.setdefault(node.args[2], node), EXPERTS, 1), (node, EXPERTS, 1))


def _starts(ruled: Sequence[tuple[fx.Node, Rule]]) -> list[int]:
    """The numbers of blocks before a factor in any dim that is a product of factors; 1 first."""
    found = {1}
    for node, rule in ruled:
        for term, _ in tensors_of(node, rule):
            for factors in term:
                before = 1
                for factor in factors:
                    found.add(before)
                    before *= rule.sizes[factor]
    return sorted(found - {0})


def _places(
    factors: Factors, rule: Rule, starts: Sequence[int], ways: int
) -> Iterator[tuple[int, str, int]]:
    """Where an axis may begin in a dim of these factors: blocks before, the factor, blocks inside it."""
    for start in starts:
        inner = start
        for factor in factors:
            size = rule.sizes[factor]
            if size > inner:
                if size % (inner * ways) == 0:
                    yield start, factor, inner
                break
            if not size or inner % size:
                break
            inner //= size


def _likeness(captured: Captured, dims: list[ParameterDim]) -> tuple[object, ...]:
    return tuple(
        sorted({(_kind(captured.placeholders[name]), dim) for name, dim in dims}, key=repr)
    )


def _kind(node: fx.Node) -> tuple[object, ...]:
    """The shape, dtype and first op of a parameter."""
    val: Tensor = node.meta["val"]
    user: Any = next(iter(node.users), None)
    return tuple(val.shape), str(val.dtype), str(getattr(user, "target", ""))
