"""Plain values of a batch that no code of the step reads: the names of files, the ids of samples.

    step({"x": x, "y": y, "path": "a.png"})      next call: "path": "b.png"

A plain value is a constant of a trace. One that differs between calls is an `UnreadValue` in the next trace,
which ends at the first read of it (`LeafRead`). A trace without a read is valid for every value.

    step({"x": x, "idx": np.arange(8)})

An object without a hash cannot be compared with that of another call. It is an `UnreadValue` in every trace,
and a step that reads it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tutti.user_lines import user_line


class LeafRead(BaseException):
    """Ends a trace that reads such a value: no `Exception`, which the step might catch.

    Args:
        at: the position of the leaf in its batch.
    """

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class UnreadValue:
    """The leaf at a position of a batch, in place of a plain value; made by `unread`.

    For `isinstance` and `hasattr` it is like the value; any other use raises `LeafRead`.
    """

    __slots__ = ("_at", "_before", "_line", "_now", "_was_read")
    _kind: type

    def __getattribute__(self, name: str) -> Any:
        kind = type(self)._kind
        if name == "__class__":
            return kind
        if name in ("__copy__", "__deepcopy__"):
            return lambda *memo: self
        if not hasattr(_get(self, "_before"), name):
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{name}'")
        raise _noted(self)

    def __setattr__(self, name: str, value: Any) -> None:
        raise _noted(self)


def _noted(x: UnreadValue) -> LeafRead:
    _set(x, "_was_read", True)
    _set(x, "_line", user_line())
    return LeafRead(_get(x, "_at"))


def _reads(x: UnreadValue, *args: Any) -> Any:
    raise _noted(x)


_get, _set = object.__getattribute__, object.__setattr__
_OF_CLASSES = frozenset(
    "class del dict doc getattribute init init_subclass module new setattr slots subclasshook".split()  # noqa: SIM905
)


@functools.cache
def _class_of(kind: type) -> type[UnreadValue]:
    """The class for values of a kind, with their special methods: Python looks those up in the class."""
    names = {
        n.strip("_"): n for n in dir(kind) if n.startswith("__") and callable(getattr(kind, n))
    }
    methods = {name: _reads for word, name in names.items() if word not in _OF_CLASSES}
    return type(
        f"Unread_{kind.__name__}", (UnreadValue,), {"__slots__": (), "_kind": kind} | methods
    )


def unread(at: int, before: Any, now: Any) -> UnreadValue:
    """The leaf at position `at` of a batch, with the values of an earlier call and of the current one."""
    made = object.__new__(_class_of(type(before)))
    slots = {"_at": at, "_before": before, "_now": now, "_was_read": False, "_line": ""}
    for name, value in slots.items():
        _set(made, name, value)
    return made


def is_incomparable(x: Any) -> bool:
    """Whether a leaf is an object without a hash, such as an array of NumPy; not of an `UnreadValue`."""
    if type(x) in _COMPARED or isinstance(x, Tensor) or is_unread(x):
        return False
    try:
        hash(x)
    except TypeError:
        return True
    return False


_COMPARED = frozenset({Tensor, int, float, str, bool, type(None)})


def with_stand_ins(leaves: list[Any]) -> list[Any]:
    """The leaves of a batch, with an `UnreadValue` in place of those that cannot be compared."""
    return [unread(k, x, x) if is_incomparable(x) else x for k, x in enumerate(leaves)]


def stands_for_incomparable(x: Any) -> bool:
    """Whether a leaf is an `UnreadValue` in place of one that cannot be compared."""
    return is_unread(x) and is_incomparable(_get(x, "_before"))


def read_in(leaves: Sequence[Any], error: BaseException) -> int | None:
    """The position of a leaf that cannot be compared, if its read has ended a trace; its next trace begins
    without a read.

    A function of C that asks for the type of its argument raises an error of its own.
    """
    at = {k: x for k, x in enumerate(leaves) if stands_for_incomparable(x)}
    for x in at.values():
        _set(x, "_was_read", False)
    if isinstance(error, LeafRead):
        return error.at if error.at in at else None
    text = str(error)
    return next((k for k, x in at.items() if type(x).__name__ in text), None)


def line_of_read(x: UnreadValue) -> str:
    """The user's line that has read it."""
    return _get(x, "_line")


def is_unread(x: Any) -> bool:
    """Whether a leaf is an `UnreadValue`; by its type, since its class is another."""
    return issubclass(type(x), UnreadValue)


def unread_kind(x: UnreadValue) -> type:
    """The type of the value."""
    return type(x)._kind


def set_now(x: UnreadValue, value: Any) -> None:
    """Note the value of the current call."""
    _set(x, "_now", value)


def value_now(x: Any) -> Any:
    """The value of the current call of an `UnreadValue`; other values as they are."""
    return _get(x, "_now") if is_unread(x) else x


def value_before(x: Any) -> Any:
    """The value of an `UnreadValue` at an earlier call, or what stands for it in a comparison; other values
    as they are."""
    if stands_for_incomparable(x):
        return UnreadValue, _get(x, "_at")
    return _get(x, "_before") if is_unread(x) else x


def refuse_reads(leaves: Sequence[Any], kept: Sequence[Any]) -> None:
    """Raise `LeafRead` if the step has read one of the `leaves` and caught the error, or has `kept` one."""
    read = [x for x in leaves if is_unread(x) and _get(x, "_was_read")]
    for x in (*read, *filter(is_unread, kept)):
        _set(x, "_was_read", False)
        raise LeafRead(_get(x, "_at"))
