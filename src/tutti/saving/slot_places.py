"""Places for slots that a checkpoint has, and that an optimizer makes only in a later call.

Lookahead makes its slow weights at the k-th call, and the Adafactor of Hugging Face keeps a number until its
first step makes a tensor of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tutti.capture.state.first_form import is_of_pytorch
from tutti.capture.state.lift import StateTensor, optimizers_of, state_of

PREFIX = "optim."


def make_slot_places(model: nn.Module, optimizer: Any, found: Mapping[str, Any]) -> None:
    """Make the slots `found` (values with `shape` and `dtype`, by name) that are not there.

    For PyTorch's own optimizers there are none. It makes none if the checkpoint lacks a slot of this
    optimizer: then it is of another one.
    """
    here = state_of(model, optimizer)
    if any(s.kind == "slot" and s.name not in found for s in here):
        return
    weights = dict(model.named_parameters())
    for one in optimizers_of(optimizer):
        if is_of_pytorch(one):
            continue
        held = {id(p) for group in one.param_groups for p in group["params"]}
        for name in _missing(here, found):
            owner, _, slot = name.removeprefix(PREFIX).rpartition(".")
            p = weights.get(owner)
            if p is not None and id(p) in held:
                form = found[name]
                made = torch.zeros(tuple(form.shape), dtype=form.dtype, device=p.device)
                one.state[p][slot] = made


def _missing(here: list[StateTensor], found: Mapping[str, Any]) -> list[str]:
    known = {s.name for s in here}
    return [
        n
        for n, x in found.items()
        if n.startswith(PREFIX) and n not in known and hasattr(x, "dtype")
    ]
