"""Layouts that need more memory than a device has because those with smaller micro-batches do.

Fewer and larger micro-batches never need less memory, up to two things: a step of one micro-batch accumulates
no gradients, and the stages of a pipeline balance a little differently. The factors leave room for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tutti.errors import LayoutError
from tutti.layout import Layout
from tutti.quantities import format_nbytes

# How far beyond the capacity the layout with smaller micro-batches must be. Weights of 2 bytes beside sums of
# their gradients of 4 bytes need three times as much as the weights alone.
_FACTOR, _FACTOR_OF_ONE = 1.5, 4.0


class SurelyTooLargeError(LayoutError):
    """A layout without an estimate: with smaller micro-batches it does not fit either.

    Args:
        finer: the layout with smaller micro-batches.
        peak_nbytes: bytes that `finer` needs at least.
        capacity: bytes of a device.
    """

    def __init__(self, finer: str, peak_nbytes: float, capacity: float) -> None:
        self.finer, self.peak_nbytes, self.capacity = finer, peak_nbytes, capacity
        super().__init__(
            f"it has no estimate: larger micro-batches need more memory, and {finer} does not fit either",
            why=f"that needs {format_nbytes(peak_nbytes)}, a device has {format_nbytes(capacity)}",
            fix="use more and smaller micro-batches",
        )

    def __reduce__(self) -> tuple[type[SurelyTooLargeError], tuple[str, float, float]]:
        return type(self), (self.finer, self.peak_nbytes, self.capacity)


class LeastPeaks:
    """The bytes that layouts need at least, for those that differ from them in `micro` alone.

    Args:
        capacity: bytes of a device that a step may use.
    """

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._found: dict[str, dict[int, float]] = defaultdict(dict)

    def add(self, layout: Layout, nbytes: float) -> None:
        """Note what `layout` needs at least, under any placement."""
        self._found[_without_micro(layout)][layout.micro] = nbytes

    def refuse(self, layout: Layout) -> None:
        """Raise `SurelyTooLargeError` if a layout with smaller micro-batches is far too large."""
        factor = _FACTOR if layout.micro > 1 else _FACTOR_OF_ONE
        text = _without_micro(layout)
        for micro, nbytes in self._found[text].items():
            if micro > layout.micro and nbytes > factor * self._capacity:
                raise SurelyTooLargeError(f"micro={micro}", nbytes, self._capacity)


def finest_first(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts with most micro-batches first, else in the same order."""
    return sorted(layouts, key=lambda layout: -layout.micro)


def _without_micro(layout: Layout) -> str:
    return " ".join(word for word in str(layout).split() if not word.startswith("micro="))
