"""This rank's rows of a batch as `DTensor`s of the whole batch's shape, without a collective."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tutti.data.rank_rows import SPLIT_AXES
from tutti.layout import Layout, Mesh
from tutti.torch_private.dtensors import made_of, spec_of


def batch_mesh(layout: Layout, device_type: str = "cpu") -> DeviceMesh:
    """The mesh of a layout's axes, `replica` and `data` first; all ranks call together the first time."""
    return _batch_mesh(layout.mesh, device_type, dist.group.WORLD)


@lru_cache(maxsize=8)
def _batch_mesh(mesh: Mesh, device_type: str, _world: Any) -> DeviceMesh:
    axes = _axes(mesh)
    ranks = torch.arange(mesh.num_ranks).reshape(tuple(size for _, size in mesh.axes))
    order = [list(mesh).index(a) for a in axes]
    return DeviceMesh(device_type, ranks.permute(order), mesh_dim_names=axes)


def _axes(mesh: Mesh) -> tuple[str, ...]:
    split = [a for a in SPLIT_AXES if a in mesh]
    return (*split, *(a for a in mesh if a not in split))


class ShardedBatches:
    """Makes `DTensor`s; keeps one spec for each shape, since PyTorch's own way computes it at each batch."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        axes = _axes(layout.mesh)
        self._placements: list[Placement] = [
            Shard(0) if a in SPLIT_AXES else Replicate() for a in axes
        ]
        self._specs: dict[Any, Any] = {}

    def of(self, part: Tensor, num_rows: int) -> DTensor:
        """The batch's tensor with `num_rows` rows, of which this rank has `part`."""
        part = part.detach().contiguous()
        key = (num_rows, part.shape, part.dtype, part.device.type)
        if key not in self._specs:
            mesh = batch_mesh(self.layout, part.device.type)
            shape = torch.Size((num_rows, *part.shape[1:]))
            made = DTensor.from_local(
                part, mesh, self._placements, run_check=False, shape=shape, stride=part.stride()
            )
            self._specs[key] = spec_of(made)
        return made_of(DTensor, part, self._specs[key])
