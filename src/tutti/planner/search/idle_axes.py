"""Axes of a layout that split nothing of a step: their ranks would all compute the same."""

from __future__ import annotations

from tutti.errors import LayoutError
from tutti.propagate.plan import ShardingPlan

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


def idle_axis(made: ShardingPlan) -> str | None:
    """The first axis of the layout that splits no parameter, no tensor of the batch and no other value."""
    axes = [a for a in MAY_BE_IDLE if made.layout.axes.get(a, 1) > 1]
    left = set(axes)
    for sharding in (*made.compute.values(), *made.samples.values()):
        left -= sharding.axes
    if left:
        for sharding in made.spread.wanted.values():
            left -= sharding.axes
    return next((a for a in axes if a in left), None)
