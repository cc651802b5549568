"""The storage sharding of state: its compute sharding, split further over `data` and `seq` by `zero`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tutti.layout import ZERO_AXES, Mesh, Segment, Sharding, split_order

# zero=1 and zero=2 shard the slots (and with them the update); zero=3 the parameters as well.
PARAMETERS_FROM = 3
SLOTS_FROM = 1


def with_zero(compute: Sharding, mesh: Mesh, axes: Sequence[str] = ZERO_AXES) -> Sharding | None:
    """`compute` with one dim split further over `axes`, or over one of them; None if no dim divides.

    It takes the first dim if that divides, since its parts are contiguous and gather without a copy; else
    the largest that divides. The new axes are the minor ones of the dim, so one plain all-gather restores
    the compute sharding.
    """
    sizes = compute.shape
    candidates = sorted(range(len(sizes)), key=lambda d: (d != 0, -sizes[d]))
    for over in _most_first(tuple(a for a in axes if a in mesh and a not in compute.axes), mesh):
        for d in candidates:
            dim = compute.dims[d]
            if len(dim) == 1 and dim[0].size % mesh.size((*dim[0].axes, *over)) == 0:
                cut = (Segment(dim[0].size, (*dim[0].axes, *over)),)
                return Sharding((*compute.dims[:d], cut, *compute.dims[d + 1 :]))
    return None


def _most_first(axes: tuple[str, ...], mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """All axes, then each alone, the largest first."""
    if len(axes) > 1:
        yield axes
    yield from sorted(((a,) for a in axes), key=mesh.size, reverse=True)


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
