"""Warns of NaN and infinity among the numbers that a step returns."""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tutti.environment import CHECK_NAN
from tutti.user_lines import users_level


class NanWarnings:
    """Of steps in a row with NaN it warns of the first, second, fourth, eighth and so on."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def look_at(self, returned: Sequence[Any], step: int) -> None:
        """Warn of the numbers on the CPU that a step has returned."""
        numbers = [x.item() for x in returned if isinstance(x, Tensor) and not x.dim() and x.is_cpu]
        wrong = [x for x in numbers if not cmath.isfinite(x)]
        self._in_a_row = self._in_a_row + 1 if wrong else 0
        count = self._in_a_row
        if count.bit_count() != 1:
            return
        ago = f", as did the {count - 1} before it" if count > 1 else ""
        for x in wrong:
            warnings.warn(
                f"step {step} returned {x}{ago}; run again with {CHECK_NAN}=1 to stop at the first node that "
                "makes it, or at the input that brings it",
                stacklevel=users_level(),
            )
