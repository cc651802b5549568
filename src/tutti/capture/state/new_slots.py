"""Slots that an optimizer makes in a later step: Lookahead's slow weights at every k-th call.

A graph has the slots that were there before its trace. A trace that would make others ends, and the call runs
eagerly, as a first step of another form does: the next graph has its slots. So does the momentum of SGD for a
weight that the step itself unfreezes: its first one is the gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.state.first_form import (
    SlotsAhead,
    first_step_ahead,
    given_optimizers,
    is_known_other,
)
from tutti.capture.state.first_step import inner_optimizers
from tutti.capture.state.fused import NoMomentum
from tutti.capture.state.lift import names_of
from tutti.capture.state.stand_ins import of_no_parameter
from tutti.torch_private.pytrees import tree_leaves

MOMENTUM = "momentum_buffer"
# The keys of slots by the name of their parameter, each with whether its value holds tensors; "" is for all.
_Keys = dict[str, dict[Any, bool]]


@contextlib.contextmanager
def no_new_slots(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """For a trace inside: raise `SlotsAhead` for slots that the step makes and its graph would lose."""
    names = names_of(model)
    every = [inner for one in given_optimizers(optimizer) for inner in inner_optimizers(one)]
    before = [_keys(one, names) for one in every]
    try:
        yield
    except NoMomentum as error:
        _say_whose(error, names, every, before)
        raise
    for one, known in zip(every, before, strict=True):
        for owner, keys in _keys(one, names).items():
            had = known.get(owner, {})
            if keys and not had and owner and is_known_other(one):
                raise first_step_ahead(one, owner)
            # One of Python's values beside others is an effect of the step.
            kept = bool(owner) and not all(had.values())
            if lost := [k for k in keys if k not in had and (keys[k] or not kept)]:
                raise slot_ahead(one, lost[0], owner)


def _say_whose(
    error: NoMomentum, names: dict[int, str], every: list[Optimizer], before: list[_Keys]
) -> None:
    """Raise `SlotsAhead` for a momentum that was not there before; nothing for one that the step removes."""
    owner = names.get(id(error.param), "")
    for one, known in zip(every, before, strict=True):
        params = [p for group in one.param_groups for p in group["params"]]
        if any(p is error.param for p in params) and not known.get(owner, {}).get(MOMENTUM):
            raise slot_ahead(one, MOMENTUM, owner) from error


def _keys(one: Optimizer, names: dict[int, str]) -> _Keys:
    found = {"": dict.fromkeys(of_no_parameter(one.state), True)}
    for group in one.param_groups:
        for p in group["params"]:
            if id(p) in names:
                slots = one.state.get(p, {})
                found[names[id(p)]] = {key: _holds_tensors(x) for key, x in slots.items()}
    return found


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(x, Tensor) for x in tree_leaves(value))


def slot_ahead(one: Optimizer, key: Any, owner: str = "") -> SlotsAhead:
    """The error for a trace that makes a slot of `owner`."""
    of = f' for "{owner}"' if owner else ""
    return SlotsAhead(
        f"{type(one).__name__} makes the slot {key!r}{of} in this step",
        why="a step is captured with slots made beforehand, and is the same at every call",
        fix="tutti.distribute(...)(*batch) takes it eagerly; or make the slot in the first step",
    )
