"""What a trace depends on besides the inputs of its graph: a call that differs in it traces again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter, is_not
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.lift import SCHEDULED
from tutti.errors import CaptureError
from tutti.runtime.hooks import Hooks
from tutti.runtime.tables import Reader, are_same, read, reader, values_of

_NUMBERS = (int, float, bool, str, type(None))
# Compared by value; a module's `forward` that was replaced is told by what it is.
_PLAIN = frozenset({*_NUMBERS, FunctionType, MethodType})


class Signatures:
    """The signatures of calls of one step on `model`."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        # What reads a module's own attributes, how many there are with those of all modules, and their values
        # at the last call; and which of the plain ones met so far those were.
        self._readers: list[Reader] = []
        self._size = -1
        self._held: list[Any] = []
        self._number = 0
        self._met: dict[Any, int] = {}
        self._version = 0  # of which modules there are
        self._walk()

    def of(self, leaves: Sequence[Any], form: Any) -> Any:
        """A hashable key: the batch's form, its shapes and constants, the optimizers' options, which modules
        there are and their plain attributes (`training`, a dropout probability, a user's own switch), which
        parameters are trained, their dtypes, and the hooks.

        Raises `CaptureError` for a leaf of the batch that is neither tensor nor constant.
        """
        if not are_same(values_of(self._children), self._below):
            self._version += 1
            self._walk()
        options = tuple(map(_options, self._optimizers))
        weights = tuple(map(_form, filter(_is_there, values_of(self._parameters))))
        attributes, hooks = self._attributes(), self._hooks.now()
        made = tuple(map(_leaf, leaves))
        return made, form, options, self._version, attributes, weights, hooks

    def _walk(self) -> None:
        """Find the modules that there are now, and the tables in which they hold each other."""
        self.modules = list(self._model.modules())
        self._children = [m._modules for m in self.modules if m._modules]
        self._below = values_of(self._children)
        self._parameters = [m._parameters for m in self.modules if m._parameters]
        self._hooks = Hooks(self.modules, self._optimizers)
        self._size = -1

    def _attributes(self) -> int:
        """A number for the modules' plain attributes of now; they are gone through where one has changed."""
        tables = [m.__dict__ for m in self.modules]
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


_form = attrgetter("requires_grad", "dtype")
_is_there = partial(is_not, None)


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
    ) + tuple(len(group["params"]) for group in optimizer.param_groups)


def _plain(table: dict[str, Any]) -> Any:
    return tuple([(k, type(v), v) for k, v in table.items() if type(v) in _PLAIN])
