"""Recurrent layers and batch norms on a GPU, without cuDNN: as on a CPU, one op after another.

cuDNN's layers are one op each, with the weights in one piece of memory; its batch norm writes running
statistics that its schema does not name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutti.capture.patch_table import BATCH_NORM, FLATTEN, INSTANCE_NORM, RECURRENT
from tutti.capture.substitutes import time_steps
from tutti.torch_private.recurrent import ENTRIES

_CHOICE = "cudnn_enabled"


def _plain(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm whose last argument is whether cuDNN may be used."""

    def called(*args: Any, **named: Any) -> Tensor:
        if _CHOICE in named:
            return norm(*args, **{**named, _CHOICE: False})
        return norm(*args[:-1], False, **named)

    return called


def _off_the_cpu(name: str, instead: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's function on a CPU, `instead` elsewhere."""
    kernel = getattr(ENTRIES, name)

    def chosen(x: Tensor, *args: Any) -> Any:
        return (kernel if x.device.type == "cpu" else instead)(x, *args)

    return chosen


INSTEAD: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(time_steps.layer, name) for name in time_steps.CELLS},
    "lstm_cell": time_steps.lstm_cell,
    "gru_cell": time_steps.gru_cell,
}
FUNCTIONS = (
    (FLATTEN, lambda _layer: None),
    (BATCH_NORM, _plain(torch.batch_norm)),
    (INSTANCE_NORM, _plain(torch.instance_norm)),
    *((RECURRENT[name], _off_the_cpu(name, instead)) for name, instead in INSTEAD.items()),
)
