"""What a trace depends on besides the inputs of its graph: a call that differs in it traces again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.lift import SCHEDULED
from tutti.errors import CaptureError
from tutti.runtime.tables import Reader, are_same, read, reader

_NUMBERS = (int, float, bool, str, type(None))


class Signatures:
    """The signatures of calls of one step on `modules`."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._modules, self._optimizers = modules, optimizers
        # What reads a module's own attributes, how many there are with those of all modules, and their values
        # at the last call; and which of the plain ones met so far those were.
        self._readers: list[Reader] = []
        self._size = -1
        self._held: list[Any] = []
        self._number = 0
        self._met: dict[Any, int] = {}

    def of(self, leaves: Sequence[Any], form: Any) -> Any:
        """A hashable key: the batch's form, its shapes and constants, the optimizers' options, and the plain
        attributes of every module (`training`, a dropout probability, a user's own switch).

        Raises `CaptureError` for a leaf of the batch that is neither tensor nor constant.
        """
        options = tuple(map(_options, self._optimizers))
        return tuple(map(_leaf, leaves)), form, options, self._attributes()

    def _attributes(self) -> int:
        """A number for the modules' plain attributes of now; they are gone through where one has changed."""
        tables = [m.__dict__ for m in self._modules]
        size = sum(map(len, tables))
        if size != self._size or not self._are_held(tables):
            plain = tuple(map(_plain, tables))
            self._number = self._met.setdefault(plain, len(self._met))
            self._readers = [reader(tuple(_own(table))) for table in tables]
            held = read(self._readers, tables)
            # To remember a tensor would keep it alive.
            forget = any(isinstance(x, Tensor) for x in held)
            self._size = -1 if forget else size
            self._held = [] if forget else held
        return self._number

    def _are_held(self, tables: list[dict[str, Any]]) -> bool:
        try:
            return are_same(read(self._readers, tables), self._held)
        except KeyError:
            return False


# What every module has: tables, which are walked where they matter.
_OF_ALL = frozenset(nn.Module().__dict__)


def _own(table: dict[str, Any]) -> Iterator[str]:
    """The attributes of a module that a trace may depend on, `training` among them."""
    return (k for k, v in table.items() if k not in _OF_ALL or type(v) in _NUMBERS)


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


def _plain(table: dict[str, Any]) -> Any:
    return tuple([v for v in table.values() if type(v) in _NUMBERS])
