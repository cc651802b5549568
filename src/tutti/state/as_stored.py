"""Shards that lie elsewhere than a program stores them: slots made of weights, and renamed weights.

`zeros_like(p)` of a shard has the placements of `p`; `zero` has slots in smaller parts. Steps of another form
need such slots: momentum that begins later, weights that are unfrozen, a new group, slots that the user
has cleared. A weight keeps its placements under another name (a pruned weight, or one that is no longer
pruned), whose own may be others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tutti.capture.state.lift import state_of
from tutti.state.residence import Residence, name_shards, part_of, placements, take_the_place
from tutti.state.shards import StateShard
from tutti.state.whole import gathered


def lay_out_as_stored(model: nn.Module, optimizer: Any, home: Residence) -> bool:
    """Lay out each shard as `home` stores it; whether one lay otherwise.

    All ranks that hold the model call together.
    """
    if home.layout.num_ranks == 1:
        return False
    coordinates = home.layout.mesh.coordinates(dist.get_rank())
    replaced: dict[int, Tensor] = {}
    for s in state_of(model, optimizer):
        if isinstance(s.tensor, StateShard) and not _lies_as_stored(
            s.name, s.tensor, home, coordinates
        ):
            whole = gathered(s.tensor, home)
            assert whole is not None
            replaced[id(s.tensor)] = part_of(s, whole, home, coordinates, home.device)
    take_the_place(model, optimizer, home, replaced)
    name_shards(state_of(model, optimizer), home)
    return bool(replaced)


def _lies_as_stored(
    name: str, x: StateShard, home: Residence, coordinates: Mapping[str, int]
) -> bool:
    if name not in home.storage:
        return True
    if home.keeps_whole(name):
        return False
    keeper = home.keeper(name, coordinates.get("pipe", 0))
    if x.device_mesh != home.device_mesh(home.device, keeper):
        return False
    return list(x.placements) == placements(home.storage[name], home.layout.stage_mesh)
