"""Python values on which a trace may depend: numbers, equality, and the key of a value."""

from __future__ import annotations

import enum
import functools
import numbers
import types
from typing import Any

import torch
from torch import Tensor

from tutti.capture.python.contents import contents_of, has_contents
from tutti.capture.python.held_values import plain_sequence
from tutti.capture.python.reach import PLAIN


def is_number(value: Any) -> bool:
    """Whether a value is a number, or a symbol of one."""
    return is_plain_number(value) or isinstance(value, (torch.SymInt, torch.SymFloat))


def is_plain_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool | enum.Enum)


def equal(a: Any, b: Any) -> bool:
    """Whether two plain values are equal; a symbol equals only itself."""
    return type(a) is type(b) and isinstance(a, PLAIN) and (a == b or (a != a and b != b))


_BY_IDENTITY = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    frozenset,
    property,
    functools.cached_property,
)


def sign(value: Any) -> Any:
    """The key of a value, without its contents: a trace depends on it."""
    if isinstance(value, PLAIN):
        plain = type(value) in (int, bool, str, bytes, type(None))
        return (type(value), value if plain else repr(value))
    if isinstance(value, Tensor):
        return (Tensor, tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, _BY_IDENTITY):
        return value
    if isinstance(value, types.MethodType):
        return (value.__func__, type(value.__self__))
    if isinstance(value, functools.partial):
        return (value.func, *map(sign, value.args))
    if isinstance(value, numbers.Number):  # of NumPy
        return (type(value), repr(value))
    if has_contents(value):
        return contents_of(value)
    if isinstance(value, list | tuple | dict):
        return (type(value), len(plain_sequence(value)))
    return type(value)
