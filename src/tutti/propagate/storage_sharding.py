"""The storage sharding of state: its compute sharding, split further by `zero` over the axes of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from tutti.layout import ZERO_AXES, Mesh, Segment, Sharding, split_order

# zero=1 and zero=2 shard the slots (and with them the update); zero=3 the parameters as well.
PARAMETERS_FROM = 3
SLOTS_FROM = 1


def with_zero(compute: Sharding, mesh: Mesh, axes: Sequence[str] = ZERO_AXES) -> Sharding | None:
    """`compute` with one dim split further over `axes`, or over some of them; None if no dim divides.

    Axes that split `compute` already are left out, such as `expert` of an expert's weights.

    It takes the first dim if that divides, since its parts are contiguous and gather without a copy; else
    the largest that divides. The new axes are the minor ones of the dim, so one plain all-gather restores
    the compute sharding. A dim that an axis of lower order splits is left out: a `DTensor` has one order.
    """
    sizes = compute.shape
    candidates = sorted(range(len(sizes)), key=lambda d: (d != 0, -sizes[d]))
    for over in _most_first(further_axes(compute, mesh, axes), mesh):
        for d in candidates:
            dim = compute.dims[d]
            both = (*dim[0].axes, *over)
            ordered = len(dim) == 1 and both == split_order(both)
            if ordered and dim[0].size % mesh.size(both) == 0:
                cut = (Segment(dim[0].size, both),)
                return Sharding((*compute.dims[:d], cut, *compute.dims[d + 1 :]))
    return None


def further_axes(compute: Sharding, mesh: Mesh, axes: Sequence[str] = ZERO_AXES) -> tuple[str, ...]:
    """Those of `axes` that `mesh` has and that do not split `compute`."""
    return tuple(a for a in axes if a in mesh and a not in compute.axes)


def _most_first(axes: tuple[str, ...], mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """Each choice of axes, those with the most parts first."""
    every = (some for n in range(len(axes), 0, -1) for some in combinations(axes, n))
    yield from sorted(every, key=mesh.size, reverse=True)


def storable(compute: Sharding) -> Sharding:
    """`compute` as a `DTensor` describes it: each dim in contiguous parts, its axes in the order of the mesh.

    A fused weight of q, k and v is split within each of the three, `3*8@tensor`. Stored, it is `24@tensor`.
    """
    dims = [
        (Segment(size, split_order(a for seg in dim for a in seg.axes)),)
        for size, dim in zip(compute.shape, compute.dims, strict=True)
    ]
    return Sharding(tuple(dims), compute.partial)


def slot_like(parameter: Sharding, shape: Sequence[int]) -> Sharding:
    """A slot has its parameter's sharding in every dim of the same size; its other dims are whole."""
    own = parameter.shape
    if len(own) != len(shape):
        return Sharding.whole(shape)
    return Sharding(
        tuple(
            dim if size == full else (Segment(int(size)),)
            for dim, size, full in zip(parameter.dims, shape, own, strict=True)
        )
    )
