"""Which numbers are inputs of a graph: finite ones, since a trace takes its inputs for finite."""

from __future__ import annotations

from typing import Any


class FreeInt(int):
    """An integer of a batch that is an input of the graph: others are constants."""


def is_finite(value: float) -> bool:
    """Whether a number may be an input of a graph; NaN and infinity are constants."""
    return value - value == 0


def is_free_number(leaf: Any) -> bool:
    """Whether a leaf of a batch is a number that is an input of the graph."""
    return (isinstance(leaf, float) and is_finite(leaf)) or type(leaf) is FreeInt
