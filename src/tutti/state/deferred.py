"""Initializes models on the meta device shard by shard, with equal weights on any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tutti.capture.second_trace.random_ops import OurRandomness
from tutti.capture.state.lift import create_slots, optimizers_of
from tutti.errors import TuttiError
from tutti.torch_private.module_tables import buffers_of, parameters_of

# The step number of initial random weights; no run reaches it.
INITIAL_STEP = 2**63 - 1


def is_deferred(model: nn.Module) -> bool:
    """Whether any parameter or buffer is still on the meta device."""
    tensors = [*model.parameters(), *model.buffers()]
    return any(x.device.type == "meta" for x in tensors)


class Stored(Protocol):
    """The value of a tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def whole(self) -> Tensor:
        """All of it, in memory of its own."""
        ...

    def part(self, index: Sequence[Tensor | None]) -> Tensor:
        """The elements at `index`, for each dim the indices or None for all."""
        ...


# The values in files of tensors on the meta device, whichever model has them by the time they are laid out.
STORED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def initial_values(
    model: nn.Module, seed: int, device: torch.device, known: Collection[int] = ()
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each meta parameter and buffer with its whole initial value, one module's at a time.

    Those with an id in `known` are left out.

    A module initializes itself: by the model's `_init_weights(module)` if it has one (Hugging Face),
    else by its own `reset_parameters()`. Random values depend only on `seed`, the order of modules and the
    global index.

    Raises:
        TuttiError: for a module that has neither.
    """
    randomness = OurRandomness(seed, INITIAL_STEP)
    done: set[int] = set(known)
    for name, module in model.named_modules():
        tables: Any = (parameters_of(module), buffers_of(module))
        meta = [
            (table, key, x)
            for table in tables
            for key, x in table.items()
            if x is not None and x.device.type == "meta" and id(x) not in done
        ]
        if not meta:
            continue
        _fill(model, module, name, meta, randomness, device)
        for table, key, x in meta:
            value = table[key].detach()
            table[key] = x
            done.add(id(x))
            yield x, value


def _fill(
    model: nn.Module,
    module: nn.Module,
    name: str,
    meta: list[Any],
    randomness: OurRandomness,
    device: torch.device,
) -> None:
    own: Any = getattr(module, "reset_parameters", None)
    whole: Any = getattr(model, "_init_weights", None)
    if own is None and whole is None:
        raise TuttiError(
            f'cannot initialize module "{name or type(model).__name__}" ({type(module).__name__})',
            why="its parameters are on the meta device, and it has no reset_parameters()",
            fix="give it a reset_parameters() method, or build the model on a real device",
        )
    for table, key, x in meta:
        value = torch.empty(x.shape, dtype=x.dtype, device=device)
        parameter = isinstance(x, nn.Parameter)
        table[key] = nn.Parameter(value, x.requires_grad) if parameter else value
    with torch.no_grad(), randomness:
        if whole is not None:
            whole(module)
        elif own is not None:
            own()


def initial_slots(optimizer: Any, parameter: Tensor, device: torch.device) -> dict[str, Any]:
    """The slots of one meta parameter, whole, as its optimizer makes them."""
    for one in optimizers_of(optimizer):
        for group in one.param_groups:
            if not any(p is parameter for p in group["params"]):
                continue
            stand_in = nn.Parameter(
                torch.zeros(parameter.shape, dtype=parameter.dtype, device=device),
                parameter.requires_grad,
            )
            kept = one.state, one.param_groups
            try:
                one.state = type(kept[0])(dict)  # type: ignore[call-arg]
                one.param_groups = [{**group, "params": [stand_in]}]
                create_slots(one)
                return dict(one.state.get(stand_in, {}))
            finally:
                one.state, one.param_groups = kept
    return {}
