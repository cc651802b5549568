"""Which hooks modules, parameters and optimizers have, told at each step at the cost of a look.

Every hook gets a number of its own, from a counter of PyTorch's: where that stands still nothing was
registered, and only what was there can have gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_OF_MODULES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ALL = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


class Hooks:
    """The hooks of `modules`, of their parameters and of `optimizers`."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._modules, self._optimizers = modules, optimizers
        self._next = -1
        self._tables: list[Any] = []  # those that hold any
        self._count = 0
        self._now: Any = None

    def now(self) -> Any:
        """A hashable key: equal where the same hooks hang at the same places."""
        next_one = RemovableHandle.next_id
        if next_one != self._next or sum(map(len, self._tables)) != self._count:
            found = [(i, table) for i, table in enumerate(self._all()) if table]
            self._tables = [table for _, table in found]
            self._count = sum(map(len, self._tables))
            self._now = tuple((i, *table) for i, table in found)
            self._next = next_one
        return self._now

    def _all(self) -> Iterator[Any]:
        yield from (getattr(of_all, name) for name in _OF_ALL)
        for module in self._modules:
            yield from (getattr(module, name) for name in _OF_MODULES)
            for p in module._parameters.values():
                yield from (getattr(p, name, None) for name in _OF_PARAMETERS)
        for one in self._optimizers:
            yield from (getattr(one, name, None) for name in _OF_OPTIMIZERS)
