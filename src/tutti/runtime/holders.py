"""Where each state tensor of a step hangs in its model and optimizers, to find it again without a walk.

A walk over all modules and slots takes 1 us a tensor, at every step. Tensors may be replaced between steps
(a checkpoint is loaded, a buffer is set anew), so what is remembered is the table that holds each, and what
must still be as it was for that table to be the right one. A step begins with all of this cold, so it is read
by a few calls that go through many tables each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.lift import StateTensor
from tutti.runtime.tables import Table, reader, values_of


class Holders:
    """The tables that hold `wanted`.

    Args:
        wanted: state tensors as `capture.lift.state_of` lists them; `tensors` gives them in this order.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], wanted: Sequence[StateTensor]
    ) -> None:
        self._optimizers = [(one, one.state) for one in optimizers]
        modules = dict(model.named_modules())
        above = [t for m in modules.values() for t in (m._modules, m._parameters) if t]
        self._fixed: list[Table] = [*above, *(one.state for one in optimizers)]
        self._held = values_of(self._fixed)
        places = _places(modules, optimizers)
        self._plan([places[s.name] for s in wanted])

    def tensors(self) -> list[Tensor] | None:
        """The tensors as they are now; None where a module, parameter or slot table was replaced."""
        if any(one.state is not state for one, state in self._optimizers):
            return None
        found = values_of(self._fixed)
        if len(found) != len(self._held) or not all(map(is_, found, self._held)):
            return None
        try:
            for read, tables in self._readers:
                found += chain.from_iterable(map(read, tables))
        except KeyError:
            return None
        return [*map(found.__getitem__, self._order)]

    def _plan(self, wanted: list[tuple[Table, str]]) -> None:
        """Which of the values held each wanted one is, or how to read it; tables with equal keys together."""
        held = {id(x): i for i, x in enumerate(self._held)}
        free = [(table, key) for table, key in wanted if id(table[key]) not in held]
        keys_of: dict[int, list[str]] = {}
        for table, key in free:
            keys_of.setdefault(id(table), []).append(key)
        alike: dict[tuple[str, ...], dict[int, Table]] = {}
        for table, _ in free:
            alike.setdefault(tuple(keys_of[id(table)]), {})[id(table)] = table
        self._readers = [(reader(keys), [*tables.values()]) for keys, tables in alike.items()]
        read = ((i, key) for keys, tables in alike.items() for i in tables for key in keys)
        at = {place: len(self._held) + k for k, place in enumerate(read)}
        self._order = [held.get(id(t[key]), at.get((id(t), key), -1)) for t, key in wanted]


def _places(
    modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]
) -> dict[str, tuple[Table, str]]:
    """The table and the key of each state tensor, by its name."""
    found: dict[str, tuple[Table, str]] = {}
    names: dict[int, str] = {}
    for prefix, module in modules.items():
        for key, p in module._parameters.items():
            if p is not None and id(p) not in names:
                names[id(p)] = name = f"{prefix}.{key}".removeprefix(".")
                found[name] = module._parameters, key
        for key in module._buffers:
            found[f"{prefix}.{key}".removeprefix(".")] = module._buffers, key
    for one in optimizers:
        for p in (p for group in one.param_groups for p in group["params"]):
            slots = one.state.get(p, {})
            found |= {f"optim.{names[id(p)]}.{slot}": (slots, slot) for slot in slots}
    return found
