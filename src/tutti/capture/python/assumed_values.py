"""The values that a trace assumes for what a step's Python reads, and so its way at each branch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tutti.capture.python.read_places import Place

# The guess for an unknown value.
_GUESS: dict[type, float] = {bool: False, int: 1, float: 1.0}
# The guess after a division by zero (`1 / (1 - x)`), as in NAdam's product.
_GENERIC = 0.7310585786


@dataclass(frozen=True)
class Assumed:
    """Values of reads by their place, from a run or a trace that went another way; others are guesses.

    Up to the first branch that goes another way, a trace reads what that run has read: these places are
    `sure`. Later values are hints: a branch that fails by one may be wrong. With `generic`, a guessed number
    is one that no formula expects.
    """

    values: Mapping[Place, float] = field(default_factory=dict)
    sure: frozenset[Place] = frozenset()
    generic: bool = False

    def guess(self, kind: type) -> float:
        """The value of an unknown read."""
        return _GENERIC if kind is float and self.generic else _GUESS[kind]
