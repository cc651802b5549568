"""Detects changes of the hooks of modules, parameters and optimizers, cheaply at each step.

Every hook gets a unique number from a counter of PyTorch: if the counter is unchanged, there are no new
hooks, and only earlier ones may be gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tutti.torch_private.module_tables import (
    hooks_of_all_modules,
    hooks_of_module,
    hooks_of_tensor,
    parameters_of,
)
from tutti.torch_private.optimizer_marks import hooks_of_optimizer


class Hooks:
    """The hooks of `modules`, of their parameters and of `optimizers`."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._modules, self._optimizers = modules, optimizers
        self._next = -1
        self._tables: list[Any] = []  # the tables with any hooks
        self._count = 0
        self._now: Any = None

    def now(self) -> Any:
        """A hashable key: equal for the same hooks at the same places."""
        next_one = RemovableHandle.next_id
        if next_one != self._next or sum(map(len, self._tables)) != self._count:
            found = [(i, table) for i, table in enumerate(self._all()) if table]
            self._tables = [table for _, table in found]
            self._count = sum(map(len, self._tables))
            self._now = tuple((i, *table) for i, table in found)
            self._next = next_one
        return self._now

    def _all(self) -> Iterator[Any]:
        yield from hooks_of_all_modules()
        for module in self._modules:
            yield from hooks_of_module(module)
            for p in parameters_of(module).values():
                yield from hooks_of_tensor(p)
        for one in self._optimizers:
            yield from hooks_of_optimizer(one)
