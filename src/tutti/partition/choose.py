"""The split of one op: of the few that its operands and results suggest, the one that moves least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tutti.layout import Mesh, Sharding
from tutti.partition.reshard import route
from tutti.propagate.factors import Assignment, axes_of, project, read
from tutti.rules import Rule
from tutti.rules.rule import Term

# A rank's work on n elements, relative to moving them: enough to prefer the split with less work.
WORK = 0.01
# Pending sums wait, if necessary with small whole partners turned into pending ones.
SMALL = 4096
# The penalty factor for a gather of an axis that should stay; of a placed weight, beside values of any size.
KEPT, PLACED = 1e3, 1e9


@dataclass(frozen=True)
class Choice:
    """The sharding of each operand and of each result, and the splits of the factors."""

    assigned: Assignment
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    cost: float


class OperandOffer(NamedTuple):
    """An operand's existing shardings, and its wanted one.

    An axis in `keeps` is gathered only as a last resort: a placed weight keeps its sharding, and values
    split over the batch stay split. `num_users` is the number of ops that use the operand, `placed` says
    that it is a weight with a compute sharding of its own.
    """

    shape: tuple[int, ...]
    versions: tuple[Sharding, ...]
    wanted: Sharding | None
    keeps: frozenset[str] = frozenset()
    num_users: int = 1
    placed: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def kept(self, mesh: Mesh) -> Sharding:
        """The first version's sharding, with only the axes that should stay."""
        return self.versions[0].only(self.keeps, mesh)

    def cost(self, target: Sharding, mesh: Mesh) -> float:
        """Elements to move to reshard this operand to `target`."""
        return min(self._cost(v, target, mesh) for v in self.versions)

    def _cost(self, version: Sharding, target: Sharding, mesh: Mesh) -> float:
        gathers = (version.axes & self.keeps) - target.axes
        penalty = (PLACED if self.placed else KEPT) if gathers else 1.0
        return route(version, target, mesh).cost * penalty


class Chooser:
    """Chooses for the ops of one program; calls with the same rule, offers and wishes share a choice."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.known: dict[object, Choice] = {}

    def choose(
        self,
        rule: Rule,
        operands: Sequence[OperandOffer],
        results: Sequence[tuple[tuple[int, ...], Sharding | None] | None],
    ) -> Choice:
        """The cached cheapest choice."""
        one = list(map(id, operands))  # an operand with two uses is one offer
        key = (rule, tuple(operands), tuple(map(one.index, one)), tuple(results))
        if key not in self.known:
            self.known[key] = choose(rule, operands, results, self.mesh)
        return self.known[key]


def choose(
    rule: Rule,
    operands: Sequence[OperandOffer],
    results: Sequence[tuple[tuple[int, ...], Sharding | None] | None],
    mesh: Mesh,
) -> Choice:
    """The cheapest choice among those that operands and results suggest."""
    best: Choice | None = None
    seen: set[tuple[tuple[str, object], ...]] = set()
    for assigned in _suggestions(rule, operands, results, mesh):
        key = tuple(sorted(assigned.items()))
        if key in seen:
            continue
        seen.add(key)
        for choice in _with_pending(rule, operands, results, assigned, mesh):
            if best is None or choice.cost < best.cost:
                best = choice
    assert best is not None
    return best


def _suggestions(
    rule: Rule,
    operands: Sequence[OperandOffer],
    results: Sequence[tuple[tuple[int, ...], Sharding | None] | None],
    mesh: Mesh,
) -> Iterator[Assignment]:
    wanted = [(t, r[1]) for t, r in zip(rule.results, results, strict=True) if r is not None]
    have = [(t, v) for t, o in zip(rule.operands, operands, strict=True) for v in o.versions[:2]]
    hoped = [(t, o.wanted) for t, o in zip(rule.operands, operands, strict=True)]
    fixed = [(t, o.kept(mesh)) for t, o in zip(rule.operands, operands, strict=True) if o.placed]
    orders = [fixed + wanted + have, wanted + hoped + have, have + wanted]
    by_size = sorted(range(len(operands)), key=lambda i: -operands[i].numel)
    for i in by_size[:4]:
        lead = (rule.operands[i], operands[i].versions[0])
        orders.append([*fixed, lead, *wanted, *have])
    read_already: set[tuple[tuple[Term, Sharding], ...]] = set()
    for pairs in orders:
        split = tuple((term, sharding) for term, sharding in pairs if sharding and sharding.axes)
        if split in read_already:
            continue
        read_already.add(split)
        assigned = read(rule, split, mesh, partly=True)
        yield assigned
        for axis in sorted({a for dim in assigned.values() for a in axes_of(dim)}):
            yield {f: d for f, d in assigned.items() if axis not in axes_of(d)}
    yield {}


def _with_pending(
    rule: Rule,
    operands: Sequence[OperandOffer],
    results: Sequence[tuple[tuple[int, ...], Sharding | None] | None],
    assigned: Assignment,
    mesh: Mesh,
) -> Iterator[Choice]:
    """The choice with every operand final, and the one where pending reductions pass through."""
    bases = [
        project(t, assigned, rule, o.shape, mesh)
        for t, o in zip(rule.operands, operands, strict=True)
    ]
    if not all(b.divides(mesh) for b in bases):
        return
    for passed in _passing(rule, operands, assigned, results):
        needed = tuple(b.with_partial(p) for b, p in zip(bases, passed, strict=True))
        through = {pair for p in passed for pair in p}
        outs = _results(rule, results, assigned, through, mesh)
        if outs is None:
            continue
        cost = sum(_operand_costs(operands, needed, mesh))
        for out, result in zip(outs, results, strict=True):
            if result is not None:
                cost += _result_cost(out, result[1], mesh)
                cost += 0.0 if through else WORK * math.prod(out.local_shape(mesh))
        yield Choice(assigned, needed, outs, cost)


def _operand_costs(
    operands: Sequence[OperandOffer], needed: Sequence[Sharding], mesh: Mesh
) -> Iterator[float]:
    """The cost of each operand; two equal uses of one operand count once."""
    paid: set[tuple[int, Sharding]] = set()
    for offer, target in zip(operands, needed, strict=True):
        if (id(offer), target) not in paid:
            paid.add((id(offer), target))
            yield offer.cost(target, mesh)


Pending = tuple[tuple[str, str], ...]


def _passing(
    rule: Rule,
    operands: Sequence[OperandOffer],
    assigned: Assignment,
    results: Sequence[tuple[tuple[int, ...], Sharding | None] | None],
) -> Iterator[list[Pending]]:
    """First the choices that keep reductions pending (the first of equal costs wins), then the others."""
    yield from _waiting(rule, operands, assigned, results)
    yield [()] * len(operands)


def _waiting(
    rule: Rule,
    operands: Sequence[OperandOffer],
    assigned: Assignment,
    results: Sequence[tuple[tuple[int, ...], Sharding | None] | None],
) -> Iterator[list[Pending]]:
    used = {a for dim in assigned.values() for a in axes_of(dim)}
    pending = [tuple(p for p in o.versions[0].partial if p[0] not in used) for o in operands]
    every = tuple(sorted({pair for p in pending for pair in p}))
    if not every or len({a for a, _ in every}) < len(every):
        return
    if any(p and o.num_users > 1 for o, p in zip(operands, pending, strict=True)):
        return  # one reduction serves all of its users
    given = sum(o.numel for o, p in zip(operands, pending, strict=True) if p)
    out = max((math.prod(r[0]) for r in results if r is not None), default=0)
    if out > max(given, len(operands)):
        return  # reduce before it grows
    for group in rule.linear:
        if any(p and i not in group for i, p in enumerate(pending)):
            continue
        if any(op != "sum" for _, op in every) and not rule.structural:
            continue
        if all(pending[i] == every or operands[i].numel <= SMALL for i in group):
            yield [every if i in group else () for i in range(len(operands))]


def _results(
    rule: Rule,
    results: Sequence[tuple[tuple[int, ...], Sharding | None] | None],
    assigned: Assignment,
    through: set[tuple[str, str]],
    mesh: Mesh,
) -> tuple[Sharding, ...] | None:
    outs = []
    for i, (term, result) in enumerate(zip(rule.results, results, strict=True)):
        if result is None:
            outs.append(Sharding(()))
            continue
        reduced = rule.reduced(i)
        partial = {
            (a, rule.reduce) for f, d in assigned.items() if f in reduced for a in axes_of(d)
        }
        if partial and through and {op for _, op in partial | through} != {"sum"}:
            return None
        out = project(term, assigned, rule, result[0], mesh)
        if not out.divides(mesh):
            return None
        outs.append(out.with_partial(partial | through))
    return tuple(outs)


def _result_cost(out: Sharding, wanted: Sharding | None, mesh: Mesh) -> float:
    """The cost to reshard the result to its wanted sharding, as far as known."""
    target = Sharding(out.dims)
    if wanted is not None and wanted.axes & (out.axes | out.partial_axes):
        target = _overlaid(wanted, out)
    return route(out, target, mesh).cost


def _overlaid(wanted: Sharding, out: Sharding) -> Sharding:
    """`wanted`, with the splits of `out` over axes that `wanted` lacks."""
    dims = tuple(
        w if axes_of(w) or set(axes_of(o)) & wanted.axes else o
        for w, o in zip(wanted.dims, out.dims, strict=True)
    )
    return Sharding(dims)
