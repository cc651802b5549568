"""Mutable values: sets, arrays of NumPy and of Python."""

from __future__ import annotations

import array
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tutti.capture.python.held_values import Table, named
from tutti.errors import CaptureError
from tutti.user_lines import quoted

_SMALL = (
    1 << 16
)  # bytes of an array that each call compares whole; of a larger one it compares a sample
_COPIED = 1 << 26  # bytes of an array that a trace copies


def has_contents(value: Any) -> bool:
    """Whether a value may change in place: a set, an array."""
    of_numpy = type(value).__module__ == "numpy" and hasattr(value, "tobytes")
    return of_numpy or isinstance(value, set | bytearray | array.array)


def contents_of(value: Any, *, whole: bool = False) -> Any:
    """The contents of a set or an array, in a comparable form; of a large array a sample, unless `whole`."""
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, bytearray | array.array):
        return bytes(value)
    try:
        flat = value.reshape(-1)
        step = 1 if whole or value.nbytes <= _SMALL else max(1, value.size // 4096)
        return (value.shape, str(value.dtype), flat[::step].tobytes())
    except (AttributeError, TypeError, ValueError):  # no array
        return type(value)


@dataclass(frozen=True)
class KeptContents:
    """A mutable value with a copy of its contents; without one for a very large array."""

    name: str
    value: Any
    copied: Any

    @property
    def changed(self) -> bool:
        if self.copied is None:
            return False
        return contents_of(self.value, whole=True) != contents_of(self.copied, whole=True)

    def put_back(self) -> None:
        if not self.changed:
            return
        if isinstance(self.value, set):
            self.value.clear()
            self.value.update(self.copied)
        elif isinstance(self.value, bytearray | array.array):
            self.value[:] = self.copied
        else:
            self.value[...] = self.copied

    def refuse_change(self) -> None:
        """Raise `CaptureError` if the step has changed its contents."""
        if self.changed:
            sized = isinstance(self.value, set) and len(self.value) != len(self.copied)
            raise refused_change(self.name, *((len(self.copied), len(self.value)) if sized else ()))


def contents(tables: Sequence[Table]) -> list[KeptContents]:
    """Every mutable value by its name, with its contents now."""
    found = [(name, x) for name, _, x in named(tables) if has_contents(x)]
    return [KeptContents(name, x, _copied(x)) for name, x in found]


def _copied(value: Any) -> Any:
    return copy.copy(value) if getattr(value, "nbytes", 0) <= _COPIED else None


def refused_change(name: str, *lengths: int, at: str = "") -> CaptureError:
    """The error for a step that changes a list, a set or an array; `lengths` are those before and after, and
    `at` is the line of a use."""
    if lengths:
        before, after = lengths
        return CaptureError(
            f"the step changes len({name}) in Python ({before}, then {after})",
            at=quoted(at),
            why="the step is captured once: what it appends would be that of this call for ever",
            fix="a step may append to a list, but use it in no other way. To read it, too: return the value, "
            f"change {name} between calls, and give what to read from it to the next call, or to a "
            "second step",
        )
    return CaptureError(
        f"the step changes what is in {name} in Python",
        why="the step is captured once: it would be changed this one time",
        fix="a torch tensor in its place, or a list or dict of numbers; or change it outside of the step",
    )
