"""Python values that a trace may depend on: which are numbers, which are equal, what of one a trace sees."""

from __future__ import annotations

import enum
import functools
import numbers
import types
from typing import Any

import torch
from torch import Tensor

from tutti.capture.python.contents import contents_of, has_contents
from tutti.capture.python.reach import PLAIN


def is_number(value: Any) -> bool:
    """A number, or one that a trace knows by a symbol."""
    return is_plain_number(value) or isinstance(value, (torch.SymInt, torch.SymFloat))


def is_plain_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool | enum.Enum)


def equal(a: Any, b: Any) -> bool:
    """Whether two plain values are the same; a symbol is only itself."""
    return type(a) is type(b) and isinstance(a, PLAIN) and (a == b or (a != a and b != b))


def sign(value: Any) -> Any:
    """What of a value a trace depends on, besides what stands in it."""
    if isinstance(value, PLAIN):
        plain = type(value) in (int, bool, str, bytes, type(None))
        return (type(value), value if plain else repr(value))
    if isinstance(value, Tensor):
        return (Tensor, tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return value
    if isinstance(value, types.MethodType):
        return (value.__func__, type(value.__self__))
    if isinstance(value, functools.partial):
        return (value.func, *map(sign, value.args))
    if isinstance(value, numbers.Number):  # of NumPy
        return (type(value), repr(value))
    if has_contents(value):
        return contents_of(value)
    return (type(value), len(value)) if isinstance(value, list | tuple | dict) else type(value)
