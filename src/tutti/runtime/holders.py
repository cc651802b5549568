"""Where each state tensor of a step hangs in its model and optimizers, to find it again without a walk.

A walk over all modules and slots takes 1 us a tensor, at every step. Tensors may be replaced between steps
(a checkpoint is loaded, a buffer is set anew), so what is remembered is the table that holds each, and what
must still be as it was for that table to be the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.lift import StateTensor


class Holders:
    """The tables that hold `wanted`.

    Args:
        wanted: state tensors as `capture.lift.state_of` lists them; `tensors` gives them in this order.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], wanted: Sequence[StateTensor]
    ) -> None:
        self._optimizers = [(one, one.state) for one in optimizers]
        # What a table must hold under a key.
        self._same: list[tuple[Any, Any, Any]] = []
        self._places: dict[str, tuple[Any, str]] = {}
        self._walk(model)
        for one in optimizers:
            self._slots(one)
        self._wanted = [self._places[s.name] for s in wanted]

    def tensors(self) -> list[Tensor] | None:
        """The tensors as they are now; None where a module, parameter or slot table was replaced."""
        if any(one.state is not state for one, state in self._optimizers):
            return None
        for table, key, held in self._same:
            if table.get(key) is not held:
                return None
        try:
            return [table[key] for table, key in self._wanted]
        except KeyError:
            return None

    def _walk(self, model: nn.Module) -> None:
        self._names: dict[int, str] = {}
        for prefix, module in model.named_modules():
            self._same += [(module._modules, k, child) for k, child in module._modules.items()]
            for key, p in module._parameters.items():
                self._same.append((module._parameters, key, p))
                if p is not None and id(p) not in self._names:
                    self._names[id(p)] = name = f"{prefix}.{key}".removeprefix(".")
                    self._places[name] = module._parameters, key
            for key in module._buffers:
                self._places[f"{prefix}.{key}".removeprefix(".")] = module._buffers, key

    def _slots(self, one: Optimizer) -> None:
        for group in one.param_groups:
            for p in group["params"]:
                slots = one.state.get(p)
                if slots is None:
                    continue
                self._same.append((one.state, p, slots))
                for slot in slots:
                    self._places[f"optim.{self._names[id(p)]}.{slot}"] = slots, slot
