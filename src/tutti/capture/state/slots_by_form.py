"""Slots of PyTorch's own optimizers, made without a step on the weights.

Their slots depend only on a parameter's form and on the options: zeros, or one number, in the shape of the
parameter, of a row or column of it, or of a scalar. A copy of the optimizer steps on small parameters
(`stand_ins.StandIns`), and this file makes its slots at full size. A step on the weights themselves
(`lift.create_slots`) would take several times the memory of all weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.state.stand_ins import StandIns

MOST_ELEMENTS, LONGEST = 64, 2  # of a stand-in


def make_slots_by_form(one: Optimizer) -> bool:
    """Make the slots of the parameters that have none.

    Returns False, and makes none, if a slot is not constant or has a shape that is not the parameter's, or
    if a parameter has no values or another order in memory.
    """
    fresh = [
        p
        for group in one.param_groups
        for p in group["params"]
        if p.requires_grad and not one.state.get(p)
    ]
    if not fresh or not all(map(_is_plain, fresh)):
        return not fresh
    copies = StandIns(one, MOST_ELEMENTS, LONGEST)
    copies.make_slots()
    made = {id(like): copies.optimizer.state.get(like, {}) for like in copies.params}
    if not all(_is_known(x, like) for like in copies.params for x in made[id(like)].values()):
        return False
    for p in fresh:
        like = copies.of[id(p)]
        if slots := made[id(like)]:
            one.state[p] = {key: _at_full_size(x, like, p) for key, x in slots.items()}
    return True


def _is_plain(p: Tensor) -> bool:
    """Whether a parameter has values, and the memory order of its stand-in."""
    return (
        type(p) in (Tensor, nn.Parameter)
        and p.layout == torch.strided
        and not p.is_meta
        and p.is_contiguous()
    )


def _is_known(x: Any, like: Tensor) -> bool:
    if not isinstance(x, Tensor):
        return x is None or isinstance(x, bool | int | float | str)
    if x.layout != torch.strided or not x.is_contiguous() or x.numel() == 0:
        return False
    by_dim = x.dim() == like.dim() and all(
        n in (1, of) for n, of in zip(x.shape, like.shape, strict=True)
    )
    return (by_dim or x.dim() == 0) and bool((x == x.flatten()[0]).all())


def _at_full_size(x: Any, like: Tensor, p: Tensor) -> Any:
    """The slot of `p`, from that of its stand-in."""
    if not isinstance(x, Tensor):
        return x
    if x.dim() == 0:
        return x.clone()
    shape = [n if m == of else m for m, of, n in zip(x.shape, like.shape, p.shape, strict=True)]
    return torch.full(shape, x.flatten()[0].item(), dtype=x.dtype, device=x.device)
