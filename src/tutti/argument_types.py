"""Refuses arguments of another type than their function takes, by name, before they are used."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np

from tutti.errors import TuttiError


def check_type(
    name: str,
    value: Any,
    kinds: type | tuple[type, ...],
    *,
    wanted: str,
    fix: str,
    error: type[TuttiError] = TuttiError,
) -> None:
    """Raise `error` unless `value` is of one of `kinds`; a truth value is a number only where they say so.

    Args:
        name: of the argument, as the caller writes it.
        wanted: what it should be, in words, such as "a text".
    """
    several = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, several) and (bool in several or not isinstance(value, bool)):
        return
    raise error(
        f"{name}={reprlib.repr(value)} is of type {type(value).__name__}, not {wanted}", fix=fix
    )


def whole_number(
    name: str,
    value: Any,
    least: int | None = None,
    *,
    fix: str = "",
    error: type[TuttiError] = TuttiError,
) -> int:
    """`value` as a Python integer; raises `error` for anything else, and for less than `least`."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if is_whole and (least is None or value >= least):
        return int(value)
    above = "" if least is None else f" from {least}"
    raise error(
        f"{name}={reprlib.repr(value)} is no whole number{above}", fix=fix or f"{name}={least or 0}"
    )
