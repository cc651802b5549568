"""Conversion between shardings of tensors and splits of an op's factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from tutti.layout import Dim, Mesh, Segment, Sharding, canonical, restricted, split_dim, united
from tutti.rules import Rule
from tutti.rules.rule import Term

Assignment = dict[str, Dim]


def axes_of(dim: Dim) -> tuple[str, ...]:
    """Every axis that splits the dim, major to minor."""
    if len(dim) == 1:
        return dim[0].axes
    return tuple(a for seg in dim for a in seg.axes)


def read(
    rule: Rule,
    pairs: Sequence[tuple[Term, Sharding | None]],
    mesh: Mesh,
    soft: Assignment | None = None,
    prefer: Mapping[str, str] | None = None,
    *,
    partly: bool = False,
) -> Assignment:
    """The factors' splits that follow from the tensors' shardings; the first of two conflicting ones wins.

    Whole factors are omitted; `soft` collects them, for cuts that follow their operand. `prefer` names the
    factor that an axis must split, if any: other splits over that axis do not count, but the other axes of a
    dim do. With `partly` the other axes of a dim count, too, where one of them already splits another factor.
    """
    assigned: Assignment = {}
    used: set[str] = set()
    for term, sharding in pairs:
        if sharding is None:
            continue
        for factors, dim in zip(term, sharding.dims, strict=True):
            if not factors or not axes_of(dim):
                continue
            parts = split_dim(dim, [rule.sizes[f] for f in factors], mesh)
            if parts is None:
                continue
            for factor, part in zip(factors, parts, strict=True):
                known = assigned.get(factor)
                taken = used - set(axes_of(known or ()))
                axes = [a for a in axes_of(part) if not prefer or prefer.get(a, factor) == factor]
                if partly:
                    axes = [a for a in axes if a not in taken]
                if not axes or taken & set(axes):
                    continue
                if len(axes) < len(axes_of(part)):
                    part = restricted(part, axes, mesh)
                both = part if known is None else united(known, part, mesh)
                if both is None:
                    continue
                if factor in rule.whole:
                    if soft is not None:
                        soft.setdefault(factor, part)
                    continue
                assigned[factor] = both
                used |= set(axes)
    return assigned


def project(
    term: Term, assigned: Mapping[str, Dim], rule: Rule, shape: Sequence[int], mesh: Mesh
) -> Sharding:
    """The sharding of a tensor under the splits `assigned` of the factors."""
    dims: list[Dim] = []
    for factors, size in zip(term, shape, strict=True):
        if len(factors) == 1:
            (factor,) = factors
            dims.append(assigned.get(factor) or (Segment(rule.sizes[factor]),))
            continue
        segments: list[Segment] = []
        for factor in factors:
            segments += assigned.get(factor, (Segment(rule.sizes[factor]),))
        dims.append(canonical(segments, mesh) or (Segment(size),))
    return Sharding(tuple(dims))


@lru_cache(maxsize=65536)
def merged(have: Sharding, more: Sharding, mesh: Mesh) -> Sharding:
    """`have` with its dims split further as in `more`, where that only adds free axes."""
    used = set(have.axes)
    dims = list(have.dims)
    for i, dim in enumerate(more.dims):
        axes, own = set(axes_of(dim)), set(axes_of(dims[i]))
        if axes - own and not axes & (used - own):
            both = united(dims[i], dim, mesh)
            if both is not None:
                dims[i] = both
                used |= axes
    return Sharding(tuple(dims), have.partial)
