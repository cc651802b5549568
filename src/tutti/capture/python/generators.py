"""Generators of random numbers of the host: Python's `random`, NumPy's, and those that a script makes.

The functions of `random` and `numpy.random` are methods of one generator each.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

PYTHON, NUMPY = "Python's random", "numpy.random"
_RANDOM: Any = random.random
# A method of NumPy's global generator: any serves to find it.
_OF_NUMPY = "random_sample"


def global_generators() -> dict[str, Any]:
    """By name, those of `random` and `numpy.random`, the latter only if it is in use."""
    numpy: Any = sys.modules.get("numpy.random")
    found = {PYTHON: _RANDOM.__self__}
    return found if numpy is None else found | {NUMPY: getattr(numpy, _OF_NUMPY).__self__}


def is_generator(x: Any) -> bool:
    """Whether a value is a generator with a state that draws change."""
    if isinstance(x, random.Random):
        return type(x) is not random.SystemRandom
    numpy: Any = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(x, (numpy.Generator, numpy.RandomState))


def generator_of(x: Any) -> Any:
    """The generator of a value that is one, or a method of one; None for any other value."""
    if is_generator(x):
        return x
    owner = getattr(x, "__self__", None) if callable(x) else None
    return owner if owner is not None and is_generator(owner) else None


def state_of(generator: Any) -> Any:
    """Its state, to compare and to put back."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return _frozen(generator.bit_generator.state)
    return _frozen(generator.get_state())


def put_state(generator: Any, state: Any) -> None:
    """Put back a state of `state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _thawed(state)
    else:
        generator.set_state(_thawed(state))


class _Array:
    """An array that compares by its bytes."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Array) and self.array.tobytes() == other.array.tobytes()

    __hash__ = None  # type: ignore[assignment]


def _frozen(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {k: _frozen(v) for k, v in x.items()}
    if isinstance(x, tuple):
        return tuple(map(_frozen, x))
    return _Array(x) if hasattr(x, "tobytes") and getattr(x, "ndim", 0) else x


def _thawed(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _thawed(v) for k, v in x.items()}
    if isinstance(x, tuple):
        return tuple(map(_thawed, x))
    return x.array if isinstance(x, _Array) else x
