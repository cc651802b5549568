"""Axes of a layout that split nothing of a step: their ranks all compute the same.

A run keeps such an axis and warns of it; a search for a layout leaves it out.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from tutti.errors import LayoutError
from tutti.layout import Layout, Sharding

# Axes that have an effect on some models only; `data` and `pipe` split every step.
MAY_BE_IDLE = ("tensor", "seq", "expert")


class IdleAxisError(LayoutError):
    """A layout with an axis that splits nothing, which is slower than the layout without it."""

    def __init__(self, axis: str, size: int) -> None:
        self.axis, self.size = axis, size
        super().__init__(
            f"{axis}={size} splits nothing of this step",
            why="its ranks would all compute the same",
            fix=f"leave {axis} out",
        )

    def __reduce__(self) -> tuple[type[IdleAxisError], tuple[str, int]]:
        return type(self), (self.axis, self.size)


def idle_axes(layout: Layout, shardings: Iterable[Sharding]) -> list[str]:
    """The axes of the layout that are in none of the shardings of a step's values."""
    left = [a for a in MAY_BE_IDLE if layout.axes.get(a, 1) > 1]
    for sharding in shardings if left else ():
        left = [a for a in left if a not in sharding.axes]
        if not left:
            break
    return left


def nothing_over(axis: str, why: str) -> str:
    """The line of `explain` for an axis over which a search splits no parameter."""
    return f"{_beginning(axis)}{why}, so its ranks do the same work"


def warn_of_idle(layout: Layout, idle: Sequence[str], words: Sequence[str]) -> None:
    """Warn, once for a layout, of axes that split nothing, with the reason in the `words` of a search."""
    for axis in idle:
        size = layout.axes[axis]
        warnings.warn(
            f"{axis}={size} splits nothing of this step, so its ranks all do the same work "
            f"({_reason(axis, size, words)}): leave {axis} out of the layout, or split the batch over "
            f"these ranks (data)",
            stacklevel=2,
        )


def _reason(axis: str, size: int, words: Sequence[str]) -> str:
    """Why: the word of a search, if there was one."""
    if axis == "seq":
        return f"no tensor of the batch has a sequence, as its dim 1, that divides by {size}"
    beginning, end = _beginning(axis), nothing_over(axis, "").removeprefix(_beginning(axis))
    found = [w.removeprefix(beginning).removesuffix(end) for w in words if w.startswith(beginning)]
    return next(iter(found), f"place splits no parameter over {axis}")


def _beginning(axis: str) -> str:
    return f"nothing over {axis}: "
