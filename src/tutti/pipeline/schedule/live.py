"""What a row holds at its peak: each micro-batch from its forward to its weight gradients."""

from __future__ import annotations

from collections.abc import Callable

from tutti.pipeline.schedule.action import WEIGHT_GRADIENTS
from tutti.pipeline.schedule.schedule import Row


def peak_held(
    row: Row, kept: Callable[[int], int], freed: Callable[[int], int] = lambda stage: 0
) -> int:
    """The most that a row holds: `kept(stage)` from F until W or B, less `freed(stage)` from I on.

    Only the order of a row counts, not when its actions take place.
    """
    held = peak = 0
    for action in row:
        stage = action.stage
        if action.kind == "F":
            held += kept(stage)
        elif action.kind == "I":
            held -= freed(stage)
        elif action.kind in WEIGHT_GRADIENTS:
            held -= kept(stage) - (freed(stage) if action.kind == "W" else 0)
        peak = max(peak, held)
    return peak
