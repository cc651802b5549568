"""The cheapest sequence of collectives that turns one sharding into another."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, count

from tutti.layout import Dim, Mesh, Segment, Sharding, canonical, split_dim
from tutti.layout.sharding import Axes

# The cost of a collective's start, in elements moved.
LATENCY = 4096.0
# The cost of a rank's own copy of n elements, relative to moving them: small, so that shorter paths win ties.
COPY = 1e-3


@dataclass(frozen=True)
class RouteStep:
    """One collective (or local cut) of a route, and the sharding after it.

    `kind` names the function of `graph.ops.collectives`; `arguments` follow the value there. `moved` is the
    number of elements that each rank sends.
    """

    kind: str
    arguments: tuple[object, ...]
    result: Sharding
    moved: float


@dataclass(frozen=True)
class Route:
    """The steps from one sharding to another and their cost in elements."""

    steps: tuple[RouteStep, ...]
    cost: float


@lru_cache(maxsize=65536)
def route(source: Sharding, target: Sharding, mesh: Mesh) -> Route:
    """The cheapest route, by Dijkstra's search over shardings.

    A dim split by several axes is ordered, major to minor: only its minor axis can be gathered, and an axis
    can only be added minor to those that are major to it in the target.
    """
    tie = count()
    heap: list[tuple[float, int, Sharding, tuple[RouteStep, ...]]] = [(0.0, next(tie), source, ())]
    done: set[Sharding] = set()
    while heap:
        cost, _, at, steps = heapq.heappop(heap)
        if at == target:
            return Route(steps, cost)
        if at in done:
            continue
        done.add(at)
        for step in _moves(at, target, mesh):
            if step.result not in done:
                more = cost + step.moved + (LATENCY if _communicates(step) else COPY)
                more += COPY * math.prod(step.result.local_shape(mesh))
                heapq.heappush(heap, (more, next(tie), step.result, (*steps, step)))
    raise AssertionError(f"no route from {source} to {target}")


def _communicates(step: RouteStep) -> bool:
    return step.kind not in ("shard", "partialize")


def _numel(sharding: Sharding, mesh: Mesh) -> int:
    return math.prod(sharding.local_shape(mesh))


def _moves(at: Sharding, target: Sharding, mesh: Mesh) -> Iterator[RouteStep]:
    yield from _reduce(at, target, mesh)
    yield from _cut(at, target, mesh)
    yield from _gather(at, mesh)
    yield from _exchange(at, target, mesh)
    yield from _make_partial(at, target)


def _reduce(at: Sharding, target: Sharding, mesh: Mesh) -> Iterator[RouteStep]:
    """All-reduce a sum that is pending here and not in the target, or reduce-scatter it onto a dim."""
    n = _numel(at, mesh)
    pending = [(a, op) for a, op in at.partial if (a, op) not in target.partial]
    for op in sorted({op for _, op in pending}):
        axes = tuple(a for a in mesh if (a, op) in pending)
        for over in {axes, *((a,) for a in axes)}:
            rest = at.with_partial(p for p in at.partial if p[0] not in over)
            size = mesh.size(over)
            yield RouteStep("all_reduce", (over, op), rest, 2 * n * (size - 1) / size)
    for over, op in _scattered(pending, target):
        rest = at.with_partial(p for p in at.partial if p[0] not in over)
        for dim, outer, result in _additions(rest, target, over, mesh):
            size = mesh.size(over)
            yield RouteStep("reduce_scatter", (over, dim, outer, op), result, n * (size - 1) / size)


def _scattered(pending: list[tuple[str, str]], target: Sharding) -> Iterator[tuple[Axes, str]]:
    """Each pending sum alone, and those of one kind over axes that split a dim of the target in order."""
    for axis, op in pending:
        yield (axis,), op
    for seg in (seg for dim in target.dims for seg in dim):
        for first, end in combinations(range(len(seg.axes) + 1), 2):
            over = seg.axes[first:end]
            for op in sorted({op for _, op in pending}):
                if len(over) > 1 and all((axis, op) in pending for axis in over):
                    yield over, op


def _cut(at: Sharding, target: Sharding, mesh: Mesh) -> Iterator[RouteStep]:
    for axis in mesh:
        if axis in at.axes or axis in at.partial_axes:
            continue
        for dim, outer, result in _additions(at, target, (axis,), mesh):
            yield RouteStep("shard", ((axis,), dim, outer), result, 0.0)


def _gather(at: Sharding, mesh: Mesh) -> Iterator[RouteStep]:
    """Gather the minor axis of a segment, or at once all minor axes that a segment must lose."""
    for dim, outer, axes, result in _removals(at, mesh):
        n, size = _numel(result, mesh), mesh.size(axes)
        yield RouteStep("all_gather", (axes, dim, outer), result, n * (size - 1) / size)


def _exchange(at: Sharding, target: Sharding, mesh: Mesh) -> Iterator[RouteStep]:
    """All-to-all: an axis leaves the end of one segment and splits another dim as in the target."""
    n = _numel(at, mesh)
    for cat_dim, cat_outer, axes, gathered in _removals(at, mesh):
        if len(axes) != 1:
            continue
        size = mesh.size(axes)
        for dim, outer, result in _additions(gathered, target, axes, mesh):
            if dim != cat_dim:
                arguments = (axes, dim, outer, cat_dim, cat_outer)
                yield RouteStep("all_to_all", arguments, result, n * (size - 1) / size)


def _make_partial(at: Sharding, target: Sharding) -> Iterator[RouteStep]:
    """A whole value becomes a pending sum: one rank keeps it, the others hold zeros.

    Reductions of two kinds are never pending at once, since their order would matter.
    """
    for axis, op in target.partial:
        mixed = any(other != op for _, other in at.partial)
        if not mixed and axis not in at.axes and axis not in at.partial_axes:
            yield RouteStep(
                "partialize", ((axis,), op), at.with_partial((*at.partial, (axis, op))), 0.0
            )


def _additions(
    at: Sharding, target: Sharding, axes: Axes, mesh: Mesh
) -> Iterator[tuple[int, int, Sharding]]:
    """The next places to add `axes` on the way to `target`: (dim, local size above them, result)."""
    for d, (have, want) in enumerate(zip(at.dims, target.dims, strict=True)):
        if not any(axes[0] in seg.axes for seg in want):
            continue
        parts = split_dim(have, [seg.size for seg in want], mesh)
        if parts is None or any(len(p) != 1 for p in parts):
            continue
        outer = 1
        for k, (part, seg) in enumerate(zip(parts, want, strict=True)):
            mine: Axes = part[0].axes
            if seg.axes[: len(mine) + len(axes)] == (*mine, *axes):
                segments = [p[0] for p in parts]
                segments[k] = Segment(seg.size, (*mine, *axes))
                if seg.size % mesh.size(segments[k].axes) == 0:
                    yield d, outer, _with_dim(at, d, canonical(segments, mesh))
            outer *= seg.size // mesh.size(mine)


def _removals(at: Sharding, mesh: Mesh) -> Iterator[tuple[int, int, Axes, Sharding]]:
    """The axes that may be gathered next: (dim, local size above, axes, result)."""
    for d, dim in enumerate(at.dims):
        outer = 1
        for k, seg in enumerate(dim):
            for first in range(len(seg.axes)):
                axes = seg.axes[first:]
                segments = list(dim)
                segments[k] = Segment(seg.size, seg.axes[:first])
                yield d, outer, axes, _with_dim(at, d, canonical(segments, mesh))
            outer *= seg.size // mesh.size(seg.axes)


def _with_dim(at: Sharding, d: int, dim: Dim) -> Sharding:
    return Sharding((*at.dims[:d], dim, *at.dims[d + 1 :]), at.partial)
