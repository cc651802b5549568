"""Tensors put in the place of others, wherever a model and its optimizers hold them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor, nn

from tutti.capture.lift import optimizers_of


def put_in_place(model: nn.Module, optimizer: Any, replaced: dict[int, Tensor]) -> None:
    """Let model and optimizer hold `replaced`, by the id of the tensor that was there."""
    if not replaced:
        return
    _replace(model, optimizer, replaced)
    for module in model.modules():
        # An LSTM keeps a list of its weights beside the table.
        if names := getattr(module, "_flat_weights_names", None):
            module._flat_weights = [getattr(module, n, None) for n in names]  # type: ignore[assignment]


def share_hooks(old: Any, new: Any) -> None:
    """The gradient hooks on a tensor are those of the one in its place; their handles remove them still."""
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, table):
            setattr(new, table, getattr(old, table))


def _replace(model: nn.Module, optimizer: Any, replaced: dict[int, Tensor]) -> None:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is not None and id(old) in replaced:
                    table[name] = replaced[id(old)]  # type: ignore[assignment]
    replace_in_optimizer(optimizer, replaced)


def replace_in_optimizer(optimizer: Any, replaced: dict[int, Tensor]) -> None:
    """The same of the optimizers alone, as keys of their state too."""
    for one in optimizers_of(optimizer):
        state: defaultdict[Any, Any] = defaultdict(dict)
        for group in one.param_groups:
            for i, old in enumerate(group["params"]):
                new = replaced.get(id(old), old)
                slots = one.state.get(old)
                if slots is not None:
                    state[new] = {
                        k: replaced.get(id(v), v) if isinstance(v, Tensor) else v
                        for k, v in slots.items()
                    }
                group["params"][i] = new
        one.state = state
