"""Finds each state tensor of a step in its model and optimizers without a walk.

A walk over all modules and slots takes 1 us a tensor, at every step. Tensors may be replaced between steps
(by a checkpoint, or a new buffer), so this keeps the table that holds each, and the conditions under which
that table is still the right one. A step begins with cold caches, so a few calls read many tables each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.calls.tables import Table, are_same, read, reader, values_of
from tutti.capture.state.lift import StateTensor
from tutti.capture.state.missing_weights import not_of_the_model
from tutti.errors import CaptureError
from tutti.torch_private.module_tables import buffers_of, children_of, parameters_of


class Holders:
    """The tables that hold `wanted`.

    Args:
        wanted: state tensors as `capture.state.lift.state_of` lists them; `tensors` gives them in this order.

    Raises:
        CaptureError: for a parameter that only an optimizer holds, and for missing state.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], wanted: Sequence[StateTensor]
    ) -> None:
        self._optimizers = [(one, one.state) for one in optimizers]
        modules = dict(model.named_modules())
        above = [t for m in modules.values() for t in (children_of(m), parameters_of(m)) if t]
        self._fixed: list[Table] = [*above, *(one.state for one in optimizers)]
        self._held = values_of(self._fixed)
        places = _places(modules, optimizers)
        if gone := [s.name for s in wanted if s.name not in places]:
            raise CaptureError(
                f'the state "{gone[0]}" is gone',
                why="a step updates the state that it had when it was captured",
                fix="Step.load_state_dict, or zeros written into it: tensor.zero_()",
            )
        self._plan([places[s.name] for s in wanted])

    def tensors(self) -> list[Tensor] | None:
        """The current tensors; None after a replacement of a module, parameter or slot table."""
        if any(one.state is not state for one, state in self._optimizers):
            return None
        found = values_of(self._fixed)
        if not are_same(found, self._held):
            return None
        try:
            found += read(self._readers, self._tables)
        except KeyError:
            return None
        return [*map(found.__getitem__, self._order)]

    def _plan(self, wanted: list[tuple[Table, str]]) -> None:
        """The position of each wanted tensor among the values held, or its reader."""
        held = {id(x): i for i, x in enumerate(self._held)}
        keys_of: dict[int, tuple[Table, list[str]]] = {}
        for table, key in wanted:
            if id(table[key]) not in held:
                keys_of.setdefault(id(table), (table, []))[1].append(key)
        self._tables = [table for table, _ in keys_of.values()]
        self._readers = [reader(tuple(keys)) for _, keys in keys_of.values()]
        places = [(i, key) for i, (_, keys) in keys_of.items() for key in keys]
        read_at = {place: len(self._held) + k for k, place in enumerate(places)}
        self._order = [
            held[id(table[key])] if id(table[key]) in held else read_at[id(table), key]
            for table, key in wanted
        ]


def missing(
    model: nn.Module, optimizers: Sequence[Optimizer], wanted: Sequence[StateTensor]
) -> list[StateTensor]:
    """Those of `wanted` that have no place any more."""
    places = _places(dict(model.named_modules()), optimizers)
    return [s for s in wanted if s.name not in places]


def _places(
    modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]
) -> dict[str, tuple[Table, str]]:
    """The table and the key of each state tensor, by its name."""
    found: dict[str, tuple[Table, str]] = {}
    names: dict[int, str] = {}
    for prefix, module in modules.items():
        for key, p in parameters_of(module).items():
            if p is not None and id(p) not in names:
                names[id(p)] = name = f"{prefix}.{key}".removeprefix(".")
                found[name] = parameters_of(module), key
        for key in buffers_of(module):
            found[f"{prefix}.{key}".removeprefix(".")] = buffers_of(module), key
    for one in optimizers:
        for p in (p for group in one.param_groups for p in group["params"]):
            if id(p) not in names:
                raise not_of_the_model(one, p, optimizers)
            slots = one.state.get(p, {})
            found |= {f"optim.{names[id(p)]}.{slot}": (slots, slot) for slot in slots}
    return found
