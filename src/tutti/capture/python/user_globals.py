"""Built-in functions under other names in the globals of the user's functions, during a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
