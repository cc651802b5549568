"""The shardings of `DTensor`s in a batch: a call takes this rank's rows without a gather.

device mesh      ("data", "tensor") of 2 x 2 ranks, or any mesh whose dims follow axes of the layout
placements       Shard(0), Replicate
sharding         8@data, 128
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from tutti.layout import Mesh, Segment, Sharding
from tutti.torch_private.dtensors import local_part


def shardings_of(tensors: Sequence[Any], mesh: Mesh) -> dict[int, Sharding]:
    """By position, the shardings of the `DTensor`s whose shards follow axes of the layout's `mesh`.

    A `DTensor` on other groups of ranks, in parts of different sizes, or with a pending sum has none.
    """
    found: dict[int, Sharding] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, DTensor):
            sharding = _sharding(x.device_mesh, x.placements, tuple(x.shape), mesh)
            if sharding is not None and sharding.axes:
                found[i] = sharding
    return found


def shard_of(x: Any) -> Tensor:
    """This rank's part of a `DTensor`, without autograd."""
    part = local_part(x)
    return (part if type(part) is Tensor else x.to_local()).detach()


def kind_of(x: Tensor) -> Any:
    """The part of a program's key that says how a tensor of a batch is sharded."""
    return (x.device_mesh, x.placements) if isinstance(x, DTensor) else None


def part_over(axis: str, sharding: Sharding, mesh: Mesh) -> Sharding | None:
    """The sharding of a part over `axis` as a tensor of its own; None unless dim 0 splits by it first.

    `16@replica+data` has parts `8@data` over a `replica` of size 2.
    """
    first, *rest = sharding.dims
    segment = first[0]
    if len(first) != 1 or segment.axes[:1] != (axis,):
        return None
    return Sharding(((Segment(segment.size // mesh.size(axis), segment.axes[1:]),), *rest))


@lru_cache(maxsize=4096)
def _sharding(
    device_mesh: Any, placements: Any, shape: tuple[int, ...], mesh: Mesh
) -> Sharding | None:
    axes: list[list[str]] = [[] for _ in shape]
    for dim, placement in enumerate(placements):
        if device_mesh.size(dim) == 1 or type(placement) is Replicate:
            continue
        axis = _axis(device_mesh, dim, mesh)
        if type(placement) is not Shard or axis is None:
            return None
        axes[placement.dim].append(axis)
    pairs = list(zip(shape, axes, strict=True))
    if any(size % mesh.size(split) for size, split in pairs):
        return None
    return Sharding(tuple((Segment(size, tuple(split)),) for size, split in pairs))


def _axis(device_mesh: Any, dim: int, mesh: Mesh) -> str | None:
    """The axis of `mesh` that has the coordinates of one dim of `device_mesh`, for all its ranks."""
    ranks = device_mesh.mesh
    for axis, size in mesh.axes:
        if size != ranks.shape[dim]:
            continue
        parts = ranks.unbind(dim)
        if all(
            mesh.coordinates(int(rank)).get(axis) == i
            for i, part in enumerate(parts)
            for rank in part.flatten()
        ):
            return axis
    return None
