"""A model and its optimizers copied whole: one copy of what both hold, attributes and hooks included.

`copy.deepcopy` takes an optimizer for what its `__getstate__` returns, and drops what a subclass has set; of
a parameter it keeps the values alone. Functions are never copied: a hook that reaches the given model by its
closure reaches that one still.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.compiled import plain
from tutti.capture.gradients import carry_hooks

Memo = dict[int, Any]


def copies_of(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Copies of both; what one holds of the other is the copy's own."""
    memo = _made_by_hooks(model)
    # so an optimizer that a scheduler, a model or another optimizer holds is copied whole, too
    with mock.patch.object(Optimizer, "__deepcopy__", _copied_optimizer, create=True):
        made = copy.deepcopy(model, memo)
        for old, new in zip(model.parameters(), made.parameters(), strict=True):
            for name, value in vars(old).items():
                vars(new).setdefault(name, _copied(value, memo))
        optimizers = copy.deepcopy(optimizer, memo)
    carry_hooks(model, made)
    return made, optimizers


def _copied_optimizer(old: Optimizer, memo: Memo) -> Optimizer:
    new = memo[id(old)] = object.__new__(type(old))
    for name, value in vars(old).items():
        if not _steps(old, name, value):
            vars(new)[name] = _copied(value, memo)
    return new


def _steps(old: Optimizer, name: str, value: Any) -> bool:
    """Whether this is what a scheduler of learning rates, or `torch.compile`, has put around the optimizer's
    own step: it would step the optimizer that it was made for."""
    own = getattr(plain(value), "__self__", None) is old
    return name == "step" and (own or hasattr(value, "_wrapped_by_lr_sched"))


def _copied(value: Any, memo: Memo) -> Any:
    """A copy, or what cannot be copied (a lock, a file, a process group) itself."""
    known = {*memo, id(memo)}  # under its own id the memory keeps alive what it has seen
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever a class's own way to copy itself may raise
        for key in [k for k in memo if k not in known]:
            del memo[key]
        return value


def _made_by_hooks(model: nn.Module) -> Memo:
    """What modules hold that is made of parameters at each call (`weight_norm`), without its history.

    In the form of `deepcopy`'s memory: PyTorch copies no tensor that has a history.
    """
    held = (x for module in model.modules() for x in vars(module).values())
    return {id(x): x.detach() for x in held if isinstance(x, Tensor) and not x.is_leaf}
