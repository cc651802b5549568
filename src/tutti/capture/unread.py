"""Plain values of a batch that no code of the step reads: the names of files, the ids of samples.

    step({"x": x, "y": y, "path": "a.png"})      next call: "path": "b.png"

A plain value is a constant of a trace. One that differs between calls is an `UnreadValue` in the next trace,
which ends at the first read of it (`LeafRead`). A trace without a read is valid for every value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


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

    __slots__ = ("_at", "_before", "_now", "_was_read")
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
    for name, value in (("_at", at), ("_before", before), ("_now", now), ("_was_read", False)):
        _set(made, name, value)
    return made


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
    """The value of an `UnreadValue` at an earlier call; other values as they are."""
    return _get(x, "_before") if is_unread(x) else x


def refuse_reads(leaves: Sequence[Any], kept: Sequence[Any]) -> None:
    """Raise `LeafRead` if the step has read one of the `leaves` and caught the error, or has `kept` one."""
    read = [x for x in leaves if is_unread(x) and _get(x, "_was_read")]
    for x in (*read, *filter(is_unread, kept)):
        _set(x, "_was_read", False)
        raise LeafRead(_get(x, "_at"))
