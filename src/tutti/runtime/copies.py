"""A model and its optimizers copied whole: one copy of what both hold, attributes and hooks included.

`copy.deepcopy` keeps the values alone of a parameter. Functions are never copied: a hook that reaches the
given model by its closure reaches that one still.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from tutti.capture.gradients import carry_hooks
from tutti.capture.optimizer_copies import Memo, copied, optimizers_copied_whole


def copies_of(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Copies of both; what one holds of the other is the copy's own."""
    memo = _made_by_hooks(model)
    # so an optimizer that a scheduler, a model or another optimizer holds is copied whole, too
    with optimizers_copied_whole():
        made = copy.deepcopy(model, memo)
        for old, new in zip(model.parameters(), made.parameters(), strict=True):
            for name, value in vars(old).items():
                vars(new).setdefault(name, copied(value, memo))
        optimizers = copy.deepcopy(optimizer, memo)
    carry_hooks(model, made)
    return made, optimizers


def _made_by_hooks(model: nn.Module) -> Memo:
    """What modules hold that is made of parameters at each call (`weight_norm`), without its history.

    In the form of `deepcopy`'s memory: PyTorch copies no tensor that has a history.
    """
    held = (x for module in model.modules() for x in vars(module).values())
    return {id(x): x.detach() for x in held if isinstance(x, Tensor) and not x.is_leaf}
