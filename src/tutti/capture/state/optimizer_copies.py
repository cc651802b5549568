"""Whole copies of optimizers: their own attributes included, parts of a model replaced by `memo`.

`copy.deepcopy` copies only the result of an optimizer's `__getstate__`, and drops a subclass's attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from tutti.capture.patch_table import DEEPCOPY
from tutti.graph.edits.patch import replaced
from tutti.torch_private.compiled_code import plain
from tutti.torch_private.optimizer_marks import is_wrapped_by_scheduler

Memo = dict[int, Any]


@contextmanager
def optimizers_copied_whole() -> Iterator[None]:
    """Inside, `copy.deepcopy` copies optimizers whole, also those inside schedulers and other optimizers."""
    with replaced((DEEPCOPY, _copied_optimizer)):
        yield


def _copied_optimizer(old: Optimizer, memo: Memo) -> Optimizer:
    new = memo[id(old)] = object.__new__(type(old))
    for name, value in vars(old).items():
        if not _steps(old, name, value):
            vars(new)[name] = copied(value, memo)
    return new


def _steps(old: Optimizer, name: str, value: Any) -> bool:
    """Whether this is a learning-rate scheduler's or `torch.compile`'s wrapper of the optimizer's own step:
    it would step the original optimizer."""
    own = getattr(plain(value), "__self__", None) is old
    return name == "step" and (own or is_wrapped_by_scheduler(value))


def own_step(optimizer: Any) -> Any:
    """The function that the user has put in place of an optimizer's `step`; None without one.

    Wrappers of schedulers do not count.
    """
    step: Any = vars(optimizer).get("step")
    while step is not None and is_wrapped_by_scheduler(step):
        step = getattr(step, "__wrapped__", None)
    if step is None or getattr(plain(step), "__self__", None) is optimizer:
        return None
    return None if step is getattr(type(optimizer), "step", None) else step


def copied(value: Any, memo: Memo) -> Any:
    """A copy, or the value itself if it cannot be copied (a lock, a file, a process group)."""
    known = {*memo, id(memo)}  # under its own id `memo` keeps visited objects alive
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a class's own copy may raise any error
        for key in [k for k in memo if k not in known]:
            del memo[key]
        return value
