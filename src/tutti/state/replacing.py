"""Replaces tensors in a model and its optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.state.lift import optimizers_of
from tutti.torch_private.module_tables import buffers_of, parameters_of, renew_flat_weights


def put_in_place(model: nn.Module, optimizer: Any, replaced: dict[int, Tensor]) -> None:
    """Put `replaced`, by the id of the old tensor, into model and optimizer."""
    if not replaced:
        return
    _replace(model, optimizer, replaced)
    for module in model.modules():
        renew_flat_weights(module)


def _replace(model: nn.Module, optimizer: Any, replaced: dict[int, Tensor]) -> None:
    for module in model.modules():
        for table in (parameters_of(module), buffers_of(module)):
            for name, old in table.items():
                if old is not None and id(old) in replaced:
                    table[name] = replaced[id(old)]  # type: ignore[assignment]
    replace_in_optimizer(optimizer, replaced)


def replace_in_optimizer(optimizer: Any, replaced: dict[int, Tensor]) -> None:
    """The same for the optimizers alone, including the keys of their state.

    Optimizers may share groups and state: one that calls another holds the same dicts. All dicts keep their
    identity, so a reader of a count in one still sees it.
    """
    every = optimizers_of(optimizer) if replaced else []
    states = {id(one.state): one.state for one in every}
    made = [(state, _renamed(state, every, replaced)) for state in states.values()]
    for state, renamed in made:
        state.clear()
        state.update(renamed)
    for one in every:
        for group in one.param_groups:
            group["params"][:] = [replaced.get(id(p), p) for p in group["params"]]


def _renamed(
    state: Mapping[Any, Any], every: Sequence[Optimizer], replaced: dict[int, Tensor]
) -> dict[Any, Any]:
    """The slots under the current parameters, in the order of the groups; then entries of no parameter."""
    made: dict[Any, Any] = {}
    for old in (p for one in every for group in one.param_groups for p in group["params"]):
        slots = state.get(old)
        if slots is not None:
            made[replaced.get(id(old), old)] = slots
            for key, value in slots.items():
                if isinstance(value, Tensor) and id(value) in replaced:
                    slots[key] = replaced[id(value)]
    made.update({k: v for k, v in state.items() if not isinstance(k, Tensor)})
    return made
