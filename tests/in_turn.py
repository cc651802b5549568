"""Cases that meet layouts in turn: each case under one of them, each layout with as many cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle


def in_turn(names: Iterable[str], layouts: Sequence[str]) -> list[tuple[str, str]]:
    """`in_turn("abc", ["x", "y"])` is [("a", "x"), ("b", "y"), ("c", "x")]."""
    return list(zip(names, cycle(layouts), strict=False))
