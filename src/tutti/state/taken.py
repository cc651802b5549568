"""Shards whole tensors that the user has put into sharded state, before the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti.capture.state.lift import StateTensor, state_of
from tutti.errors import CaptureError
from tutti.state.residence import name_shards, part_of, take_the_place, whole_of
from tutti.state.residences import known_residence
from tutti.state.shards import StateShard


def take_over(
    model: nn.Module, optimizer: Any, expected: list[StateTensor], now: list[Tensor]
) -> bool:
    """Cut whole tensors of the user in the place of shards to this rank's part; whether there were any.

    All ranks have the same values (a state dict of the optimizer, a new slot), so they send nothing.
    """
    home = known_residence(model)
    assert home is not None
    replaced: dict[int, Tensor] = {}
    coordinates = home.layout.mesh.coordinates(dist.get_rank())
    for entry, x in zip(expected, now, strict=True):
        if home.keeps_whole(entry.name):
            if isinstance(x, DTensor):
                replaced[id(x)] = _plain(entry, x.full_tensor(), x.requires_grad)
        elif not isinstance(x, StateShard):
            whole = whole_of(x).to(home.device)
            if tuple(whole.shape) != home.storage[entry.name].shape:
                raise of_another_shape(entry.name, x, home.storage[entry.name].shape)
            replaced[id(x)] = part_of(
                replace(entry, tensor=x), whole, home, coordinates, home.device
            )
    take_the_place(model, optimizer, home, replaced)
    if replaced:
        name_shards(state_of(model, optimizer), home)
    return bool(replaced)


def _plain(entry: StateTensor, whole: Tensor, requires_grad: bool) -> Tensor:
    return nn.Parameter(whole, requires_grad) if entry.kind == "parameter" else whole


def of_another_shape(name: str, x: Tensor, was: Sequence[int]) -> CaptureError:
    """The error for state in whose place another shape has come, without another module."""
    return CaptureError(
        f'the state "{name}" is {list(x.shape)} now, and was {list(was)}',
        why="the captured step holds for one shape; of other modules a step is captured anew",
        fix="another module in place of the old one (model.head = nn.Linear(...)); or the same shape",
    )
