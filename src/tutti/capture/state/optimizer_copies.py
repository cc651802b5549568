"""An optimizer copied whole: attributes of its own included, with what it holds of a model as `memo` says.

`copy.deepcopy` takes an optimizer for what its `__getstate__` returns, and drops what a subclass has set.
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
    """Inside, `copy.deepcopy` copies optimizers so, wherever one is held: by a scheduler, by another one."""
    with replaced((DEEPCOPY, _copied_optimizer)):
        yield


def _copied_optimizer(old: Optimizer, memo: Memo) -> Optimizer:
    new = memo[id(old)] = object.__new__(type(old))
    for name, value in vars(old).items():
        if not _steps(old, name, value):
            vars(new)[name] = copied(value, memo)
    return new


def _steps(old: Optimizer, name: str, value: Any) -> bool:
    """Whether this is what a scheduler of learning rates, or `torch.compile`, has put around the optimizer's
    own step: it would step the optimizer that it was made for."""
    own = getattr(plain(value), "__self__", None) is old
    return name == "step" and (own or is_wrapped_by_scheduler(value))


def copied(value: Any, memo: Memo) -> Any:
    """A copy, or what cannot be copied (a lock, a file, a process group) itself."""
    known = {*memo, id(memo)}  # under its own id the memory keeps alive what it has seen
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever a class's own way to copy itself may raise
        for key in [k for k in memo if k not in known]:
            del memo[key]
        return value
