"""Replacements of built-in functions and classes in the globals of functions, during a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def in_place_of(name: str, value: Any, scopes: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Inside, the built-in `name` is `value` in these globals, except where the user has one of this name."""
    put: list[dict[str, Any]] = []
    try:
        for scope in scopes:
            if name not in scope:
                put.append(scope)
                scope[name] = value
        yield
    finally:
        for scope in put:
            scope.pop(name, None)


class _Like(type):
    """The metaclass of a replacement of `plain`: a call with one argument calls `convert`."""

    plain: type
    convert: Callable[[Any], Any]

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, cls.plain)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, cls.plain)

    def __call__(cls, *given: Any, **options: Any) -> Any:
        if len(given) != 1 or options:
            return cls.plain(*given, **options)
        return cls.convert(*given)


def like(plain: type, convert: Callable[[Any], Any]) -> type:
    """A replacement of the class `plain` whose call `(x)` returns `convert(x)`.

    Code may use it as the class itself: `isinstance(x, float)`, `float | Tensor`.
    """
    return _Like(plain.__name__, (plain,), {"plain": plain, "convert": staticmethod(convert)})
