"""Draws the random numbers of a call, of the program that the call has.

The numbers decide which program that is: each candidate draws its own from the same states of the host's
generators, which at the end are as after the draws of the one that plays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tutti.capture.python.drawn_numbers import Drawn
from tutti.capture.python.generators import put_state, state_of
from tutti.capture.python.held_values import TableEntry


class HostDraws:
    """Those of one step, call by call.

    Args:
        find: the current entry of a Python value, for that of a trace.
    """

    def __init__(self, find: Callable[[TableEntry], TableEntry]) -> None:
        self._find = find
        # The generators from which this call has drawn, by id, with their states before.
        self._before: dict[int, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """Begin a call."""
        if self._before:
            self._before = {}

    def put_back(self) -> None:
        """Undo the draws of this call."""
        for generator, state in self._before.values():
            put_state(generator, state)

    def added(self, given: Mapping[str, float], drawn: Drawn) -> Mapping[str, float] | None:
        """The numbers `given` and those of a program with these draws; None if it is for others."""
        if self._before:
            self.put_back()
        if not drawn:
            return given
        generators = drawn.generators(self._find)
        if None in generators.values():  # the script has put something else there
            return None
        for one in generators.values():
            if id(one) not in self._before:
                self._before[id(one)] = one, state_of(one)
        taken = drawn.take(generators)
        return None if taken is None else {**given, **taken}
