"""The inputs of each replica: its ranks, its rows of the global batch, and its own seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tutti.errors import ShardingError
from tutti.graph.randomness import random
from tutti.layout import Mesh
from tutti.torch_private.pytrees import tree_flatten, tree_unflatten

_STREAM = 0x7265706C69636173  # no random op of a program has this stream


def replica_here(mesh: Mesh) -> int:
    """This rank's replica; 0 before there are ranks, and without replicas."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return replica_of(mesh, rank)


def replica_of(mesh: Mesh, rank: int) -> int:
    """The replica of a rank; 0 without replicas."""
    return mesh.coordinates(rank).get("replica", 0)


def rows(tensors: Sequence[Tensor], replica: int, num_replicas: int) -> list[Tensor]:
    """Part `replica` of `num_replicas` of each tensor's dim 0, if that is the dim of samples.

    As with the axis `data`, the first tensor with dims gives the number of samples; every replica gets
    a tensor of another size whole.

    Raises:
        ShardingError: the samples do not divide by the replicas.
    """
    found = list(tensors)
    num_samples = next((x.shape[0] for x in tensors if x.ndim), 0)
    if num_samples % num_replicas:
        first = next(i for i, x in enumerate(tensors) if x.ndim)
        raise ShardingError(
            f'cannot split dim 0 of "batch.{first}" (size {num_samples}) over axis "replica" '
            f"(size {num_replicas})",
            at=f"batch tensor {first}",
            why="each replica trains on its rows of the global batch",
            fix=f"a batch size that {num_replicas} divides "
            f"({-(-num_samples // num_replicas) * num_replicas})",
        )
    size = num_samples // num_replicas
    for i, x in enumerate(tensors):
        if x.ndim and x.shape[0] == num_samples:
            found[i] = x.narrow(0, replica * size, size)
    return found


def of_batch(batch: Any, replica: int, num_replicas: int) -> Any:
    """The same for the tensors in a nest of lists, tuples and dicts."""
    leaves, spec = tree_flatten(batch)
    own = iter(rows([x for x in leaves if isinstance(x, Tensor)], replica, num_replicas))
    return tree_unflatten([next(own) if isinstance(x, Tensor) else x for x in leaves], spec)


def seed_of(seed: int, replica: int) -> int:
    """The seed of random ops such as dropout: replica 0 has the run's, others their own."""
    return random.key(seed, _STREAM, replica) if replica else seed
