"""The peak of a row's memory: each micro-batch counts from its forward to its weight gradients."""

from __future__ import annotations

from collections.abc import Callable

from tutti.pipeline.schedule.action import WEIGHT_GRADIENTS
from tutti.pipeline.schedule.schedule import Row


def peak_held(
    row: Row, kept: Callable[[int], int], freed: Callable[[int], int] = lambda stage: 0
) -> int:
    """The peak of a row: `kept(stage)` from F until W or B, less `freed(stage)` from I on.

    Only the order of a row counts, not the times of its actions.
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
