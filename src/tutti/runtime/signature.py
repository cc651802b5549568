"""What a trace depends on besides the inputs of its graph: a call that differs in it traces again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.lift import SCHEDULED
from tutti.errors import CaptureError

_NUMBERS = (int, float, bool, str, type(None))


class Signatures:
    """The signatures of calls of one step on `modules`."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._modules, self._optimizers = modules, optimizers
        # All attributes at the last call, and which of the plain ones met so far those were.
        self._held: list[Any] = []
        self._number = 0
        self._met: dict[Any, int] = {}

    def of(self, leaves: Sequence[Any], spec: Any) -> Any:
        """A hashable key: the batch's shapes and constants, the optimizers' options, and the plain
        attributes of every module (`training`, a dropout probability, a user's own switch).

        Raises `CaptureError` for a leaf of the batch that is neither tensor nor constant.
        """
        options = tuple(map(_options, self._optimizers))
        return tuple(map(_leaf, leaves)), spec, options, self._attributes()

    def _attributes(self) -> int:
        """A number for the modules' plain attributes of now; they are read where something has changed."""
        held = [*chain.from_iterable([m.__dict__.values() for m in self._modules])]
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            plain = tuple(map(_plain, self._modules))
            self._number = self._met.setdefault(plain, len(self._met))
            # To remember a tensor would keep it alive.
            self._held = [] if any(isinstance(x, Tensor) for x in held) else held
        return self._number


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


def _plain(module: nn.Module) -> Any:
    return tuple([v for v in module.__dict__.values() if type(v) in _NUMBERS])
