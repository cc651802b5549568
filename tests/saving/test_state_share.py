"""Equal shards are saved once, by ranks that choose alike."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ranks import Ranks
from tutti.checkpoint.manifest import Manifest
from tutti.saving.state_share import StateShare

NOTHING = Manifest("", "", {}, "", {})


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_plain_tensors_are_divided_evenly(count: int) -> None:
    chance = random.Random(count)
    state: dict[str, Tensor] = {
        f"{k}": torch.empty(chance.choice([1, 10, 100, 1000]), dtype=chance.choice(DTYPES))
        for k in range(100)
    }
    shares = [
        StateShare(state, NOTHING).spread(position, count).tensors for position in range(count)
    ]
    assert sorted(name for one in shares for name in one) == sorted(state)
    loads = [sum(x.nbytes for x in one.values()) for one in shares]
    assert max(loads) - min(loads) <= max(x.nbytes for x in state.values())


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def owners(placements: list[Placement], size: int) -> list[tuple[str, tuple[int, ...]]]:
    """Name and mesh coordinates of the shards that this rank saves, of a mesh 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2))
    state: dict[str, Tensor] = {
        f"w{k}": DTensor.from_local(torch.full((size, size), float(k)), mesh, placements)
        for k in range(5)
    }
    state["plain"] = torch.zeros(3)
    share = StateShare(state, NOTHING).spread(dist.get_rank(), dist.get_world_size())
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    mine = tuple(c for c, p in zip(coordinates, placements, strict=True) if p.is_shard())
    for name in share.tensors:
        expected = 0.0 if name == "plain" else float(name[1:])
        assert share.part(name).flatten()[0] == expected
    return [(name, () if name == "plain" else mine) for name in share.tensors]


@pytest.mark.parametrize("kinds", [*product([Replicate(), Shard(0), Shard(1)], repeat=2)])
def test_each_shard_is_saved_by_one_rank(ranks: Ranks, kinds: tuple[Placement, ...]) -> None:
    found = [one for mine in ranks.run(owners, list(kinds), 3, n=4) for one in mine]
    num_shards = [2 if kind.is_shard() else 1 for kind in kinds]
    expected = {(f"w{k}", ()) for k in range(5)}
    for num in num_shards:
        if num == 2:
            expected = {(name, (*at, c)) for name, at in expected for c in range(2)}
    assert sorted(found) == sorted(expected | {("plain", ())})
