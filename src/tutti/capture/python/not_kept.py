"""Stands for a value that a step leaves in a module on one device, and that its calls do not keep.

    self.weights = attention        read by nobody in the step: at each call all ranks would send their parts

After a call the place has a `NotKept`: any use of it raises an error with the name, instead of a value of an
earlier call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from tutti.capture.python.held_values import TableEntry
from tutti.capture.python.left_values import LeftValue, tensors_in
from tutti.errors import TuttiError
from tutti.user_lines import quoted, user_line


class NotKeptError(TuttiError, AttributeError):
    """A use of a value that calls do not keep."""


class Placeholder:
    """In the place of such a value."""

    __slots__ = ("_form", "_name", "_why")

    def __init__(self, name: str, form: str, why: str) -> None:
        self._name, self._form, self._why = name, form, why

    def __repr__(self) -> str:
        return f"<{self._name}: {self._form}, not kept after a call of the step>"

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse()
        return repr(self)

    def __reduce__(self) -> Any:
        return Placeholder, (self._name, self._form, self._why)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotKeptError(
            f"{self._name} is not kept after a call of the step",
            at=quoted(user_line()),
            why=f"the step leaves a {self._form} there, and no call reads it before: {self._why}",
            fix="return it from the step; for a later call of it: read it in each call "
            f"(0 * {self._name}), or make it a buffer",
        )

    @classmethod
    def __torch_function__(cls, _func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a function of torch."""
        given = [*args, *(kwargs or {}).values()]
        flat = [y for x in given for y in (x if isinstance(x, list | tuple) else (x,))]
        next(x for x in flat if isinstance(x, Placeholder))._refuse()

    __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = __call__ = _refuse
    __float__ = __int__ = __index__ = __complex__ = __array__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _refuse
    )
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __floordiv__ = __mod__ = _refuse


@dataclass(frozen=True)
class NotKept:
    """The place of a value that calls do not keep, and what comes there."""

    entry: TableEntry
    placeholder: Placeholder

    @classmethod
    def coupled(cls, entry: TableEntry) -> NotKept:
        """For a number that needs all samples at once, in a layout with micro-batches."""
        why = "it needs all samples at once, and micro-batches have some"
        return cls(entry, Placeholder(entry.name, "number", why))

    @classmethod
    def of(cls, left: LeftValue) -> NotKept:
        """For a value of the current trace."""
        tensor = next(tensors_in(left.value), None)
        kind = type(left.value).__name__
        form = kind if tensor is None else f"tensor of shape {list(tensor.shape)}"
        if tensor is not None and not isinstance(left.value, Tensor):
            form = f"{kind} with a {form}"
        why = "ranks would gather it at each call"
        return cls(left.entry, Placeholder(left.entry.name, form, why))
