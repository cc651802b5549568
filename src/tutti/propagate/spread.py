"""One generic propagation: shardings spread along shared factors, both ways, to a fixed point."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from tutti.graph.ops.boundary import boundary
from tutti.layout import Mesh, Segment, Sharding
from tutti.propagate.factors import Assignment, axes_of, merged, project, read
from tutti.rules import Rule, is_tensor_call, operands_of
from tutti.rules.book import Book
from tutti.rules.rule import Term

# The strength of splits: placed weights before all others.
STRONG, WEAK = 0, 1
# The strength of each axis of a tensor, axes in order.
Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An op's proposal for its tensors: the sharding of each, and the strength of each axis."""

    shardings: tuple[Sharding, ...]
    ranks: dict[str, int]


@dataclass
class Spread:
    """Shardings wanted so far, by node, and for each node and axis the node that it came from.

    `rank` is the strength of an axis of a node (smaller is stronger): if two operands would split different
    factors of an op over one axis, the stronger decides. `closed` nodes keep their sharding. `accepts` gives
    the axes that an open node may take. `alias` maps nodes that must share a sharding to one of them.
    """

    mesh: Mesh
    wanted: dict[fx.Node, Sharding] = field(default_factory=dict)
    origin: dict[tuple[fx.Node, str], fx.Node | str] = field(default_factory=dict)
    rank: dict[tuple[fx.Node, str], int] = field(default_factory=dict)
    closed: set[fx.Node] = field(default_factory=set)
    accepts: dict[fx.Node, frozenset[str]] = field(default_factory=dict)
    alias: dict[fx.Node, fx.Node] = field(default_factory=dict)
    book: Book = field(default_factory=Book)
    outcomes: dict[tuple[Any, ...], Outcome | None] = field(default_factory=dict)
    _nodes: list[fx.Node] = field(default_factory=list)  # of the last graph read
    _ruled: list[tuple[fx.Node, Rule]] = field(default_factory=list)
    _tensors: dict[fx.Node, tuple[tuple[Term, ...], list[fx.Node]]] = field(default_factory=dict)
    _around: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _due: set[fx.Node] = field(default_factory=set)

    def seed(
        self, node: fx.Node, sharding: Sharding, why: str, *, closed: bool = False, rank: int = WEAK
    ) -> None:
        """Set a sharding from outside, with its reason and its strength."""
        node = self.alias.get(node, node)
        self.wanted[node] = (
            merged(self.wanted[node], sharding, self.mesh) if node in self.wanted else sharding
        )
        for axis in sharding.axes:
            self.origin.setdefault((node, axis), why)
            self.rank.setdefault((node, axis), rank)
        if closed:
            self.closed.add(node)

    def of(self, node: fx.Node) -> Sharding | None:
        """The sharding wanted of a node so far."""
        return self.wanted.get(self.alias.get(node, node))

    def rule(self, node: fx.Node) -> Rule | None:
        """The cached rule of a node."""
        return self.book.of(node)

    def run(self, graph: fx.Graph) -> None:
        """Spread to a fixed point: cheap ops first, so that contractions see their settled shardings."""
        if not any(sharding.axes for sharding in self.wanted.values()):
            return  # one rank: no splits
        nodes = list(graph.nodes)
        if nodes != self._nodes:
            self._read(nodes)
        cheap = [(n, rule) for n, rule in self._ruled if not _contracts(rule)]
        self._due = {n for n, _ in self._ruled}
        for stage in (cheap, self._ruled):
            while any([self._sweep(stage), self._sweep(stage[::-1])]):
                pass

    def _read(self, nodes: list[fx.Node]) -> None:
        """Note the ops with a rule, their tensors, and the ops around each tensor."""
        calls = [n for n in nodes if is_tensor_call(n) and n.target is not boundary]
        self._nodes = nodes
        self._ruled = [(n, rule) for n in calls if (rule := self.rule(n)) is not None]
        self._tensors.clear()
        self._around.clear()
        for node, rule in self._ruled:
            pairs = tensors_of(node, rule)
            xs = [self.alias.get(x, x) for _, x in pairs]
            self._tensors[node] = tuple(term for term, _ in pairs), xs
            for x in xs:
                self._around.setdefault(x, []).append(node)

    def _sweep(self, nodes: list[tuple[fx.Node, Rule]]) -> bool:
        """Visit, in order, the ops with a changed tensor; return whether one changed a sharding."""
        changed = False
        for node, rule in nodes:
            if node in self._due:
                self._due.discard(node)
                changed |= self._visit(node, rule)
        return changed

    def _visit(self, node: fx.Node, rule: Rule) -> bool:
        terms, xs = self._tensors[node]
        wanted = tuple(self.wanted.get(x) for x in xs)
        if not any(s is not None and s.axes for s in wanted):
            return False
        ranks = tuple(
            tuple(self.rank.get((x, axis), WEAK) for axis in sorted(s.axes)) if s else ()
            for x, s in zip(xs, wanted, strict=True)
        )
        key = (rule, terms, wanted, ranks)
        if key not in self.outcomes:
            shapes = [tuple(x.meta["val"].shape) for x in xs]
            self.outcomes[key] = _outcome(rule, terms, shapes, wanted, ranks, self.mesh)
        outcome = self.outcomes[key]
        if outcome is None:
            return False
        changed = False
        for x, sharding in zip(xs, outcome.shardings, strict=True):
            changed |= self._push(x, sharding, node, outcome.ranks)
        return changed

    def _push(self, x: fx.Node, more: Sharding, via: fx.Node, ranks: dict[str, int]) -> bool:
        if x in self.closed or x.op == "placeholder":
            return False
        have = self.wanted.get(x) or Sharding.whole(x.meta["val"].shape)
        new = merged(have, more, self.mesh)
        allowed = self.accepts.get(x)
        if new.dims == have.dims or (allowed is not None and new.axes - have.axes - allowed):
            return False
        self.wanted[x] = new
        for axis in new.axes - have.axes:
            self.origin[x, axis] = via
            self.rank[x, axis] = ranks.get(axis, WEAK)
        self._due.update(self._around[x])
        return True


def _outcome(
    rule: Rule,
    terms: Sequence[Term],
    shapes: Sequence[tuple[int, ...]],
    wanted: Sequence[Sharding | None],
    ranks: Sequence[Ranks],
    mesh: Mesh,
) -> Outcome | None:
    """The op's proposal from the wanted shardings of its tensors; None without one."""
    soft: Assignment = {}
    prefer, strongest = _strongest(rule, terms, wanted, ranks, mesh)
    assigned = read(rule, list(zip(terms, wanted, strict=True)), mesh, soft, prefer)
    _follow(rule, assigned, soft, mesh)
    if not assigned:
        return None
    projected = (
        project(t, assigned, rule, shape, mesh) for t, shape in zip(terms, shapes, strict=True)
    )
    return Outcome(tuple(projected), strongest)


def _strongest(
    rule: Rule,
    terms: Sequence[Term],
    wanted: Sequence[Sharding | None],
    ranks: Sequence[Ranks],
    mesh: Mesh,
) -> tuple[dict[str, str], dict[str, int]]:
    """For each axis the factor with the strongest split over it, and the strength of that split."""
    prefer: dict[str, str] = {}
    strongest: dict[str, int] = {}
    for term, sharding, given in zip(terms, wanted, ranks, strict=True):
        rank_of = dict(zip(sorted(sharding.axes), given, strict=True)) if sharding else {}
        for factor, dim in read(rule, [(term, sharding)], mesh).items():
            for axis in axes_of(dim):
                if rank_of[axis] < strongest.get(axis, WEAK + 1):
                    prefer[axis], strongest[axis] = factor, rank_of[axis]
    return prefer, strongest


def tensors_of(node: fx.Node, rule: Rule) -> list[tuple[Term, fx.Node]]:
    """The operands and the used results of a call with their terms of the rule."""
    pairs = list(zip(rule.operands, operands_of(node), strict=True))
    if isinstance(node.meta["val"], Tensor):
        return [*pairs, (rule.results[0], node)]
    results = [u for u in node.users if u.target is operator.getitem]
    return pairs + [(rule.results[u.args[1]], u) for u in results]  # type: ignore[index]


def _follow(rule: Rule, assigned: Assignment, soft: Assignment, mesh: Mesh) -> None:
    """Split cuts of a split dim the same way, if their size allows."""
    used = {a for dim in assigned.values() for a in axes_of(dim)}
    for a, b in rule.follows:
        for one, other in ((a, b), (b, a)):
            part = soft.get(one)
            if part is None or len(part) != 1 or other in assigned or used & set(part[0].axes):
                continue
            if rule.sizes[other] % mesh.size(part[0].axes):
                continue
            assigned[other] = (Segment(rule.sizes[other], part[0].axes),)


def _contracts(rule: Rule | None) -> bool:
    return rule is not None and any(rule.reduced(i) for i in range(len(rule.results)))
