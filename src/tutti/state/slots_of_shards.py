"""Slots that an optimizer makes of weights in shards: they lie as these do, and not as a program stores them.

`zeros_like(p)` of a shard has the placements of `p`; `zero` has slots in smaller parts. Steps of another form
need such slots: momentum that begins later, weights that are unfrozen, a new group, slots that the user
has cleared.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tutti.capture.state.lift import state_of
from tutti.state.residence import Residence, name_shards, part_of, placements, take_the_place
from tutti.state.shards import StateShard
from tutti.state.whole import gathered


def lay_out_slots(model: nn.Module, optimizer: Any, home: Residence) -> None:
    """Lay out each shard as `home` stores it; all ranks that hold the model call together."""
    if home.layout.num_ranks == 1:
        return
    coordinates = home.layout.mesh.coordinates(dist.get_rank())
    replaced: dict[int, Tensor] = {}
    for s in state_of(model, optimizer):
        if isinstance(s.tensor, StateShard) and not _lies_as_stored(s.name, s.tensor, home):
            whole = gathered(s.tensor, home)
            assert whole is not None
            replaced[id(s.tensor)] = part_of(s, whole, home, coordinates, home.device)
    take_the_place(model, optimizer, home, replaced)
    if replaced:
        name_shards(state_of(model, optimizer), home)


def _lies_as_stored(name: str, x: StateShard, home: Residence) -> bool:
    if name not in home.storage or home.keeps_whole(name):
        return True
    return list(x.placements) == placements(home.storage[name], home.layout.stage_mesh)
