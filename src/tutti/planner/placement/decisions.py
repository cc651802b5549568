"""Decisions of a search: groups of dims to split, of equal layers at once, and which exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from tutti.planner.placement.dim_groups import DimGroup, ParameterDim


@dataclass(frozen=True)
class Decision:
    """Split these dims of parameters over one axis, or none of them; `ops` run along them."""

    dims: tuple[ParameterDim, ...]
    ops: frozenset[str] = frozenset()

    @property
    def parameters(self) -> frozenset[str]:
        """The parameters that it splits."""
        return frozenset(name for name, _ in self.dims)

    def excludes(self, other: Decision) -> bool:
        """Whether both would split one parameter."""
        return bool(self.parameters & other.parameters)


def decisions(groups: Sequence[DimGroup], fixed: Iterable[str] = ()) -> list[Decision]:
    """One decision for all groups of equal layers, apart from groups that exclude each other.

    Args:
        groups: of one axis.
        fixed: parameters with a sharding of the user; they stay as they are.
    """
    closed = frozenset(fixed)
    found: dict[tuple[object, ...], list[list[DimGroup]]] = {}
    for group in groups:
        sets = found.setdefault(group.likeness, [])
        for one in sets:
            if not any(group.parameters & other.parameters for other in one):
                one.append(group)
                break
        else:
            sets.append([group])
    made = []
    for one in (one for sets in found.values() for one in sets):
        dims = tuple(d for group in one for d in group.dims if d[0] not in closed)
        if dims:
            made.append(Decision(dims, frozenset().union(*(group.ops for group in one))))
    return made


def needs_wide_layers(groups: Sequence[DimGroup]) -> bool:
    """Whether groups of equal layers exclude each other: neighbors need different shardings."""
    by_likeness: dict[tuple[object, ...], set[str]] = {}
    for group in groups:
        seen = by_likeness.setdefault(group.likeness, set())
        if seen & group.parameters:
            return True
        seen |= group.parameters
    return False


# By parameter and dim the axes that split it, major to minor.
Splits = Mapping[ParameterDim, tuple[str, ...]]


def splits_of(
    chosen: Iterable[Decision], axis: str, before: Splits | None = None
) -> dict[ParameterDim, tuple[str, ...]]:
    """The splits that are chosen over `axis`, after those of other axes."""
    found = dict(before or {})
    for dim in (d for decision in chosen for d in decision.dims):
        found[dim] = (*found.get(dim, ()), axis)
    return found


def place_of(splits: Splits, num_dims: Mapping[str, int]) -> dict[str, str]:
    """The entries of `place` for splits, by parameter."""
    names = dict.fromkeys(name for name, _ in splits)
    return {
        name: ", ".join("+".join(splits.get((name, i), ())) or "-" for i in range(num_dims[name]))
        for name in names
    }


def exclusions(given: Sequence[Decision]) -> list[tuple[int, int]]:
    """The pairs that exclude each other, by position."""
    pairs = combinations(range(len(given)), 2)
    return [(i, j) for i, j in pairs if given[i].excludes(given[j])]
