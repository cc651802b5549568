"""Plays one op in every way that its rule allows, on virtual ranks, against the op on whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from tutti.graph.ops.boundary import IDENTITIES
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Dim, Mesh, Segment, Sharding, assemble
from tutti.partition.choose import Choice, _results
from tutti.partition.localize import Call, Local, emit_local
from tutti.propagate.factors import Assignment, project
from tutti.rules import Rule, rule_of
from tutti.rules.rule import results_of
from tutti.rules.samples.sample import Sample

ONE_AXIS = tuple(Mesh.parse(f"a={n}") for n in (2, 3, 4))
TWO_AXES = Mesh.parse("a=2 b=2")
MODE = FakeTensorMode()
# A fake tensor says of what type a value is: one for each type serves all samples.
_FAKES: dict[Any, Tensor] = {}
NUM_DRAWS = 2  # of the values of a sample: its ways take them in turn
Pending = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Way:
    """One way to split a call: the mesh, the factors' splits, and what is pending in which operands."""

    mesh: Mesh
    assigned: Assignment
    group: frozenset[int] = frozenset()
    through: Pending = ()

    def __str__(self) -> str:
        splits = " ".join(f"{f}={'*'.join(map(str, d))}" for f, d in self.assigned.items())
        pending = f" pending {self.through} in {sorted(self.group)}" if self.through else ""
        return f"{self.mesh}: {splits or 'nothing split'}{pending}"


def _split(rule: Rule, factor: str, axes: tuple[str, ...], mesh: Mesh) -> Assignment | None:
    size = rule.sizes[factor]
    if size % mesh.size(axes) or size == 0:
        return None
    return {factor: (Segment(size, axes),)}


def _composite(rule: Rule, factor: str, mesh: Mesh) -> Assignment | None:
    """The factor as two segments, the minor one split: what a view that merged dims leaves."""
    size, ways = rule.sizes[factor], mesh.size("a")
    if size % (2 * ways) or size == 2 * ways == 0:
        return None
    dim: Dim = (Segment(2), Segment(size // 2, ("a",)))
    return {factor: dim}


def assignments(rule: Rule, *, thorough: bool = True) -> Iterator[tuple[Mesh, Assignment]]:
    """Every factor that may be split: on one axis, as a minor part, on two axes; and pairs of factors."""
    free = [f for f in rule.factors if f not in rule.whole]
    candidates: list[tuple[Mesh, Assignment | None]] = [(ONE_AXIS[0], {})]
    for factor in free:
        for mesh in ONE_AXIS:
            candidates.append((mesh, _split(rule, factor, ("a",), mesh)))
        candidates.append((ONE_AXIS[0], _composite(rule, factor, ONE_AXIS[0])))
        if thorough:
            for axes in (("a", "b"), ("b", "a")):
                candidates.append((TWO_AXES, _split(rule, factor, axes, TWO_AXES)))
    if thorough:
        for one, other in itertools.permutations(free, 2):
            first = _split(rule, one, ("a",), TWO_AXES)
            second = _split(rule, other, ("b",), TWO_AXES)
            candidates.append((TWO_AXES, first | second if first and second else None))
    for mesh, assigned in candidates:
        if assigned is not None:
            yield mesh, assigned


def ways(rule: Rule, *, thorough: bool = True, truths: Set[int] = frozenset()) -> Iterator[Way]:
    """Every assignment with final operands; then, for each linear group, with its operands pending.

    `truths`: which operands hold truth values.
    """
    for mesh, assigned in assignments(rule, thorough=thorough):
        yield Way(mesh, assigned)
    for group in rule.linear:
        if group & truths:
            continue
        for op in ("sum", "max") if rule.structural else ("sum",):
            yield Way(ONE_AXIS[1], {}, group, (("a", op),))
            for factor in rule.factors:
                split = None if factor in rule.whole else _split(rule, factor, ("b",), TWO_AXES)
                if split and not (op != "sum" and any(factor in rule.reduced(i) for i in range(1))):
                    yield Way(TWO_AXES, split, group, (("a", op),))


def choice_of(
    rule: Rule, node: fx.Node, shapes: Sequence[Sequence[int]], way: Way
) -> Choice | None:
    """The choice that the partitioner would make of `way`; None where something does not divide."""
    operands = []
    for i, (term, shape) in enumerate(zip(rule.operands, shapes, strict=True)):
        sharding = project(term, way.assigned, rule, shape, way.mesh)
        operands.append(sharding.with_partial(way.through if i in way.group else ()))
    if not all(s.divides(way.mesh) for s in operands):
        return None
    wanted = [None if r is None else (tuple(r.shape), None) for r in results_of(node)]
    through = set(way.through)
    results = _results(rule, wanted, way.assigned, through, way.mesh)
    return None if results is None else Choice(way.assigned, tuple(operands), results, 0.0)


def parts_of(x: Tensor, sharding: Sharding, mesh: Mesh, generator: torch.Generator) -> list[Tensor]:
    """Every rank's part of `x`; where a reduction is pending, random parts that it makes into `x`."""
    values: list[Tensor] = [x] * mesh.num_ranks
    for axis, op in sharding.partial:
        for group in mesh.groups([axis]):
            noise = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for _ in group]
            if not x.is_floating_point():
                noise = [torch.round(3 * z) for z in noise]
            if op == "sum":
                rest = torch.stack(noise[1:]).sum(0)
                fresh = [values[group[0]] - rest, *noise[1:]]
            else:
                fresh = [values[group[0]] - noise[0].abs() for _ in group]
                fresh[int(generator.initial_seed()) % len(group)] = values[group[0]]
            for rank, value in zip(group, fresh, strict=True):
                values[rank] = value.to(x.dtype)
    return [sharding.cut(v, mesh, mesh.coordinates(r)).contiguous() for r, v in enumerate(values)]


def written(node: fx.Node, rule: Rule, choice: Choice, mesh: Mesh) -> tuple[fx.Graph, fx.Node]:
    """The program of one rank that holds this op only."""
    local = Local(MODE, mesh)
    local._empty = _FAKES
    operands = []
    for i, (x, sharding) in enumerate(zip(operands_in(node), choice.operands, strict=True)):
        made = local.graph.placeholder(f"x{i}")
        made.meta["val"] = local.empty(x.meta["val"], sharding)
        operands.append(made)
    call = Call(local, node, choice, operands, lambda x: x)
    identity = node.target in IDENTITIES
    made = operands[0] if identity else emit_local(local, node, rule, call)
    local.graph.output(made)
    return local.graph, made


def operands_in(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.graph.nodes if n.op == "placeholder"]


def check_result(
    parts: list[Tensor], whole: Tensor, sharding: Sharding, mesh: Mesh, where: str
) -> None:
    """Every rank's part, its pending reductions carried out, is its cut of `whole`."""
    for part in parts:
        expected = sharding.local_shape(mesh)
        assert tuple(part.shape) == expected, f"{where}: shape {tuple(part.shape)}, not {expected}"
        assert part.dtype == whole.dtype, f"{where}: {part.dtype}, not {whole.dtype}"
    groups = mesh.groups([a for a in mesh if a in sharding.partial_axes])
    for group in groups:
        total = parts[group[0]]
        if len(group) > 1:
            total = assemble(
                [parts[r] for r in group],
                Sharding.whole(total.shape).with_partial(
                    (("g", op) for _, op in sharding.partial[:1])
                ),
                Mesh((("g", len(group)),)),
            )
        cut = sharding.cut(whole, mesh, mesh.coordinates(group[0]))
        _equal(total, cut, f"{where}, rank {group[0]}")
    _equal(assemble(parts, sharding, mesh), whole, f"{where}, assembled")


def _equal(have: Tensor, want: Tensor, where: str) -> None:
    if have.dtype == want.dtype and torch.equal(have, want):
        return  # as most are, to the bit
    if want.is_floating_point() or want.is_complex():
        torch.testing.assert_close(
            have, want, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda m: f"{where}\n{m}"
        )
    else:
        assert torch.equal(have, want), f"{where}\n{have}\n{want}"


@dataclass(frozen=True)
class Draw:
    """Values of a sample's operands, and its results on one device."""

    values: list[Tensor]
    dense: list[Any]

    @classmethod
    def of(cls, sample: Sample, seed: int) -> Draw:
        generator = torch.Generator().manual_seed(seed)
        values = [o.made(generator) for o in sample.operands()]
        return cls(values, as_list(dense_result(sample, [v.clone() for v in values])))


def check_way(
    sample: Sample, node: fx.Node, rule: Rule, way: Way, seed: int, draw: Draw | None = None
) -> bool:
    """Play `sample` in one way and compare; whether it could be played so."""
    inputs = operands_in(node)
    choice = choice_of(rule, node, [tuple(x.meta["val"].shape) for x in inputs], way)
    if choice is None:
        return False
    generator = torch.Generator().manual_seed(seed)
    draw = draw or Draw.of(sample, seed)
    values = [v.clone() for v in draw.values]
    graph, _ = written(node, rule, choice, way.mesh)
    fed = [
        parts_of(v, s, way.mesh, generator) for v, s in zip(values, choice.operands, strict=True)
    ]
    ranks = [[parts[r] for parts in fed] for r in range(way.mesh.num_ranks)]
    played = VirtualRanks(way.mesh).run(graph, nn.Module(), ranks)
    for i, (want, sharding) in enumerate(zip(draw.dense, choice.results, strict=True)):
        if isinstance(want, Tensor):
            have = [as_list(p)[i] for p in played]
            check_result(have, want, sharding, way.mesh, f"{sample}, {way}, result {i}")
    return True


def dense_result(sample: Sample, values: list[Tensor]) -> Any:
    """The call on whole tensors, on a mesh of one virtual rank (which answers random ops)."""
    if sample.op in IDENTITIES:
        return values[0]
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(values))]
    args, kwargs = sample._with(inputs)
    graph.output(graph.call_function(sample.op, args, kwargs))
    return VirtualRanks(Mesh()).run(graph, nn.Module(), [values])[0]


def as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, list | tuple) else [x]


def check(sample: Sample, rule: Rule | None = None, *, seed: int = 0, thorough: bool = True) -> int:
    """Play `sample` in every way that its rule (or `rule`) allows; the number of ways."""
    node = sample.node(MODE)
    rule = rule or rule_of(node)
    assert rule is not None, f"no rule for {sample}"
    check_terms(rule, node)
    count = 0
    # no sum of truths is a truth
    truths = {i for i, o in enumerate(sample.operands()) if o.dtype == torch.bool}
    draws = [Draw.of(sample, seed * 1000 + k) for k in range(NUM_DRAWS)]
    for k, way in enumerate(ways(rule, thorough=thorough, truths=truths)):
        count += check_way(sample, node, rule, way, seed * 1000 + k, draws[k % NUM_DRAWS])
    return count


def check_terms(rule: Rule, node: fx.Node) -> None:
    """The rule has a term for each tensor, and its factors make up the dims."""
    shapes = [tuple(x.meta["val"].shape) for x in operands_in(node)]
    shapes += [() if r is None else tuple(r.shape) for r in results_of(node)]
    terms = [*rule.operands, *rule.results]
    assert len(terms) == len(shapes), f"{node.target}: {len(terms)} terms, {len(shapes)} tensors"
    for term, shape in zip(terms, shapes, strict=True):
        assert len(term) == len(shape), f"{node.target}: {rule} has {term} for shape {shape}"
        for factors, size in zip(term, shape, strict=True):
            product = torch.Size([rule.sizes[f] for f in factors]).numel()
            assert not factors or product == size, f"{node.target}: {rule}, {factors} for {size}"
