"""What a trace depends on besides the inputs of its graph: a call that differs in it traces again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.lift import SCHEDULED
from tutti.errors import CaptureError

_NUMBERS = (int, float, bool, str, type(None))


def signature(
    leaves: Sequence[Any], spec: Any, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> Any:
    """A hashable key: the batch's shapes and constants, the optimizers' options, and the plain
    attributes of every module (`training`, a dropout probability, a user's own switch).

    Raises `CaptureError` for a leaf of the batch that is neither tensor nor constant.
    """
    return (
        tuple(map(_leaf, leaves)),
        spec,
        tuple(map(_options, optimizers)),
        tuple(map(_attributes, modules)),
    )


def _leaf(x: Any) -> Any:
    if isinstance(x, Tensor):
        return (tuple(x.shape), x.dtype, x.device)
    if isinstance(x, float):
        return float  # an input of the graph
    try:
        hash(x)
    except TypeError:
        raise CaptureError(
            f"the batch holds a {type(x).__module__}.{type(x).__name__}, which the step cannot take",
            why="what is not a tensor is a constant of the captured step, and this cannot be compared",
            fix="torch.as_tensor(x)",
        ) from None
    return (type(x), x)


def _options(optimizer: Optimizer) -> Any:
    return tuple(
        (key, value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key not in SCHEDULED
        and key not in ("params", "initial_lr")
        and isinstance(value, (*_NUMBERS, tuple))
    )


def _attributes(module: nn.Module) -> Any:
    return tuple([v for v in module.__dict__.values() if type(v) in _NUMBERS])
