"""Cuts a tensor, whole or sharded, to this rank's part."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tutti.torch_private.dtensors import local_part


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """The local part of `value`, whole or sharded, with the sharding of `like`; a new tensor."""
    if isinstance(value, DTensor) and isinstance(like, DTensor):
        same = value.device_mesh == like.device_mesh and value.placements == like.placements
        return local_part(value if same else _resharded(value.full_tensor(), like)).clone()
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    whole = whole.detach().to(dtype=like.dtype, device=like.device)
    if isinstance(like, DTensor):
        return local_part(_resharded(whole, like)).clone()
    return whole.clone()


def _resharded(whole: Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
