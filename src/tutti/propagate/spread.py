"""One generic propagation: shardings spread along shared factors, both ways, to a fixed point."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch import Tensor, fx

from tutti.graph.boundary import boundary
from tutti.layout import Mesh, Segment, Sharding
from tutti.propagate.factors import Assignment, axes_of, merged, project, read
from tutti.rules import Rule, is_tensor_call, operands_of, rule_of
from tutti.rules.rule import Term

# How strong the word behind a split is: where a weight is placed, against all else.
STRONG, WEAK = 0, 1


@dataclass
class Spread:
    """Shardings wanted so far, by node, and for each node and axis the node that it came from.

    `rank` says how strong the word behind an axis of a node is (smaller is stronger): where two operands
    would split different factors of an op over one axis, the stronger decides.
    `closed` nodes keep what they have. `accepts` says which axes an open node may take. `alias` maps
    nodes that must lie alike to one that stands for them.
    """

    mesh: Mesh
    wanted: dict[fx.Node, Sharding] = field(default_factory=dict)
    origin: dict[tuple[fx.Node, str], fx.Node | str] = field(default_factory=dict)
    rank: dict[tuple[fx.Node, str], int] = field(default_factory=dict)
    closed: set[fx.Node] = field(default_factory=set)
    accepts: dict[fx.Node, frozenset[str]] = field(default_factory=dict)
    alias: dict[fx.Node, fx.Node] = field(default_factory=dict)
    rules: dict[fx.Node, Rule | None] = field(default_factory=dict)
    _seen: dict[fx.Node, list[Sharding | None]] = field(default_factory=dict)
    _tensors: dict[fx.Node, list[tuple[Term, fx.Node]]] = field(default_factory=dict)

    def seed(
        self, node: fx.Node, sharding: Sharding, why: str, *, closed: bool = False, rank: int = WEAK
    ) -> None:
        """Give a sharding from outside, with the reason for it and how strong the word is."""
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
        """The rule of a node, worked out once."""
        if node not in self.rules:
            self.rules[node] = rule_of(node)
        return self.rules[node]

    def run(self, graph: fx.Graph) -> None:
        """Spread to a fixed point: cheap ops first, so that contractions see what settled."""
        self._seen.clear()
        self._tensors.clear()
        nodes = [n for n in graph.nodes if is_tensor_call(n) and n.target is not boundary]
        nodes = [n for n in nodes if self.rule(n) is not None]
        cheap = [n for n in nodes if not _contracts(self.rule(n))]
        for stage in (cheap, nodes):
            while any([self._sweep(stage), self._sweep(stage[::-1])]):
                pass

    def _sweep(self, nodes: list[fx.Node]) -> bool:
        changed = False
        for node in nodes:
            changed |= self._visit(node)
        return changed

    def _visit(self, node: fx.Node) -> bool:
        rule = self.rule(node)
        assert rule is not None
        tensors = self._tensors.get(node)
        if tensors is None:
            tensors = self._tensors[node] = tensors_of(node, rule)
        wanted = [self.of(x) for _, x in tensors]
        if all(map(operator.is_, wanted, self._seen.get(node, ()))) and node in self._seen:
            return False  # nothing around it has changed
        self._seen[node] = wanted
        pairs = [(term, s) for (term, _), s in zip(tensors, wanted, strict=True)]
        if not any(s is not None and s.axes for s in wanted):
            return False
        soft: Assignment = {}
        prefer, ranks = self._strongest(rule, tensors)
        assigned = read(rule, pairs, self.mesh, soft, prefer)
        _follow(rule, assigned, soft, self.mesh)
        changed = False
        if assigned:
            for term, x in tensors:
                changed |= self._push(x, term, rule, assigned, node, ranks)
        return changed

    def _strongest(
        self, rule: Rule, tensors: list[tuple[Term, fx.Node]]
    ) -> tuple[dict[str, str], dict[str, int]]:
        """For each axis the factor that the strongest word splits over it, and that word's rank."""
        prefer: dict[str, str] = {}
        ranks: dict[str, int] = {}
        for term, x in tensors:
            x = self.alias.get(x, x)
            for factor, dim in read(rule, [(term, self.wanted.get(x))], self.mesh).items():
                for axis in axes_of(dim):
                    rank = self.rank.get((x, axis), WEAK)
                    if rank < ranks.get(axis, WEAK + 1):
                        prefer[axis], ranks[axis] = factor, rank
        return prefer, ranks

    def _push(
        self,
        x: fx.Node,
        term: Term,
        rule: Rule,
        assigned: Assignment,
        via: fx.Node,
        ranks: dict[str, int],
    ) -> bool:
        x = self.alias.get(x, x)
        if x in self.closed or x.op == "placeholder":
            return False
        shape = tuple(x.meta["val"].shape)
        have = self.wanted.get(x) or Sharding.whole(shape)
        new = merged(have, project(term, assigned, rule, shape, self.mesh), self.mesh)
        allowed = self.accepts.get(x)
        if new.dims == have.dims or (allowed is not None and new.axes - have.axes - allowed):
            return False
        self.wanted[x] = new
        for axis in new.axes - have.axes:
            self.origin[x, axis] = via
            self.rank[x, axis] = ranks.get(axis, WEAK)
        return True


def tensors_of(node: fx.Node, rule: Rule) -> list[tuple[Term, fx.Node]]:
    """The operands and the used results of a call with their terms of the rule."""
    pairs = list(zip(rule.operands, operands_of(node), strict=True))
    if isinstance(node.meta["val"], Tensor):
        return [*pairs, (rule.results[0], node)]
    results = [u for u in node.users if u.target is operator.getitem]
    return pairs + [(rule.results[u.args[1]], u) for u in results]  # type: ignore[index]


def _follow(rule: Rule, assigned: Assignment, soft: Assignment, mesh: Mesh) -> None:
    """Cuts of a split dim are worth splitting the same way where their size allows."""
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
