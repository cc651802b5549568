"""One generic propagation: shardings spread along shared factors, both ways, to a fixed point."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Change(NamedTuple):
    """A further split of one tensor of an op: its position, its proposed and its new sharding."""

    position: int
    proposed: Sharding
    sharding: Sharding


@dataclass(frozen=True, slots=True)
class Outcome:
    """An op's proposal for its tensors: those that it splits further, and the strength of each axis."""

    changes: tuple[Change, ...]
    ranks: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Op:
    """An op with a rule and its tensors. `head` is the number of its pair of rule and terms."""

    rule: Rule
    terms: tuple[Term, ...]
    xs: list[fx.Node]
    head: int


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
    # Outcomes by the number of rule and terms, and the numbers of the tensors' shardings and strengths.
    _outcomes: dict[tuple[int, ...], Outcome | None] = field(default_factory=dict)
    _heads: dict[tuple[Rule, tuple[Term, ...]], int] = field(default_factory=dict)
    _numbers: dict[tuple[Sharding, Ranks], int] = field(default_factory=dict)
    _number_of: dict[fx.Node, int] = field(default_factory=dict)
    _nodes: list[fx.Node] = field(default_factory=list)  # of the last graph read
    _ops: dict[fx.Node, _Op] = field(default_factory=dict)
    _around: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _changed: set[fx.Node] = field(default_factory=set)  # tensors, since the last run
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
        self._note(node)
        self._changed.add(node)

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        """Drop the shardings wanted of some nodes."""
        for node in nodes:
            if self.wanted.pop(node, None) is not None:
                del self._number_of[node]
                self._changed.add(node)

    def of(self, node: fx.Node) -> Sharding | None:
        """The sharding wanted of a node so far."""
        return self.wanted.get(self.alias.get(node, node))

    def rule(self, node: fx.Node) -> Rule | None:
        """The cached rule of a node."""
        return self.book.of(node)

    def run(self, graph: fx.Graph) -> None:
        """Spread to a fixed point: cheap ops first, so that contractions see their settled shardings.

        A further run starts from the ops and tensors that changed since the last one.
        """
        if not any(sharding.axes for sharding in self.wanted.values()):
            return  # one rank: no splits
        nodes = list(graph.nodes)
        if nodes != self._nodes:
            self._read(nodes)
        for x in self._changed:
            self._due.update(self._around.get(x, ()))
        self._changed.clear()
        cheap = [(n, op) for n, op in self._ops.items() if not op.rule.contracts]
        for stage in (cheap, list(self._ops.items())):
            while any([self._sweep(stage), self._sweep(stage[::-1])]):
                pass

    def _read(self, nodes: list[fx.Node]) -> None:
        """Note the ops with a rule, their tensors, and the ops around each tensor; new ops are due."""
        before, self._ops, self._nodes = self._ops, {}, nodes
        self._around.clear()
        for node in nodes:
            if not is_tensor_call(node) or node.target is boundary:
                continue
            if (rule := self.rule(node)) is None:
                continue
            pairs = tensors_of(node, rule)
            terms = tuple(term for term, _ in pairs)
            xs = [self.alias.get(x, x) for _, x in pairs]
            head = self._heads.setdefault((rule, terms), len(self._heads))
            op = self._ops[node] = _Op(rule, terms, xs, head)
            if before.get(node) != op:
                self._due.add(node)
            for x in xs:
                self._around.setdefault(x, []).append(node)

    def _sweep(self, ops: Iterable[tuple[fx.Node, _Op]]) -> bool:
        """Visit, in order, the ops with a changed tensor; return whether one changed a sharding."""
        changed = False
        for node, op in ops:
            if node in self._due:
                self._due.discard(node)
                changed |= self._visit(node, op)
        return changed

    def _visit(self, node: fx.Node, op: _Op) -> bool:
        number_of = self._number_of
        key = (op.head, *[number_of.get(x, 0) for x in op.xs])
        if key not in self._outcomes:
            self._outcomes[key] = self._outcome(op)
        if (outcome := self._outcomes[key]) is None:
            return False
        changed = False
        for change in outcome.changes:
            x, new = op.xs[change.position], change.sharding
            if number_of.get(x, 0) != key[1 + change.position]:  # an operand with two uses
                new = merged(self._have(x), change.proposed, self.mesh)
            changed |= self._push(x, new, node, outcome.ranks)
        return changed

    def _outcome(self, op: _Op) -> Outcome | None:
        wanted = [self.wanted.get(x) for x in op.xs]
        if not any(s is not None and s.axes for s in wanted):
            return None
        ranks = [self._ranks(x, s) if s else () for x, s in zip(op.xs, wanted, strict=True)]
        shapes = [tuple(x.meta["val"].shape) for x in op.xs]
        proposal = _proposal(op.rule, op.terms, shapes, wanted, ranks, self.mesh)
        if proposal is None:
            return None
        changes = []
        for position, (x, more) in enumerate(zip(op.xs, proposal[0], strict=True)):
            have = self._have(x)
            new = merged(have, more, self.mesh)
            if new.dims != have.dims:
                changes.append(Change(position, more, new))
        return Outcome(tuple(changes), proposal[1])

    def _have(self, x: fx.Node) -> Sharding:
        return self.wanted.get(x) or Sharding.whole(x.meta["val"].shape)

    def _ranks(self, x: fx.Node, sharding: Sharding) -> Ranks:
        return tuple(self.rank.get((x, axis), WEAK) for axis in sorted(sharding.axes))

    def _note(self, x: fx.Node) -> None:
        """Number a tensor's sharding and strengths."""
        pair = self.wanted[x], self._ranks(x, self.wanted[x])
        self._number_of[x] = self._numbers.setdefault(pair, len(self._numbers) + 1)

    def _push(self, x: fx.Node, new: Sharding, via: fx.Node, ranks: dict[str, int]) -> bool:
        if x in self.closed or x.op == "placeholder":
            return False
        have = self._have(x)
        more = new.axes - have.axes
        allowed = self.accepts.get(x)
        if new.dims == have.dims or (allowed is not None and more - allowed):
            return False
        self.wanted[x] = new
        for axis in more:
            self.origin[x, axis] = via
            self.rank[x, axis] = ranks.get(axis, WEAK)
        self._note(x)
        self._due.update(self._around[x])
        return True


def _proposal(
    rule: Rule,
    terms: Sequence[Term],
    shapes: Sequence[tuple[int, ...]],
    wanted: Sequence[Sharding | None],
    ranks: Sequence[Ranks],
    mesh: Mesh,
) -> tuple[list[Sharding], dict[str, int]] | None:
    """The shardings that an op proposes for its tensors, and the strength of each axis; None without any."""
    soft: Assignment = {}
    prefer, strongest = _strongest(rule, terms, wanted, ranks, mesh)
    assigned = read(rule, list(zip(terms, wanted, strict=True)), mesh, soft, prefer)
    _follow(rule, assigned, soft, mesh)
    if not assigned:
        return None
    pairs = zip(terms, shapes, strict=True)
    return [project(t, assigned, rule, shape, mesh) for t, shape in pairs], strongest


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
