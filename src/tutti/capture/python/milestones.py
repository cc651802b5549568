"""The milestones of a scheduler that the step calls: compared with its count, which is a symbol.

`MultiStepLR` looks up its count in a `Counter`. A lookup needs a hash, and so one value: each call would be
traced. Comparisons with each milestone are guards, and all counts between milestones have one trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class ComparedKeys:
    """The lookups of a `Counter`, by comparisons with each of its keys."""

    def __init__(self, counts: Mapping[Any, int]) -> None:
        self.counts = counts

    def __contains__(self, key: Any) -> bool:
        return any(key == one for one in self.counts)

    def __getitem__(self, key: Any) -> int:
        return next((count for one, count in self.counts.items() if key == one), 0)


def comparing(get_lr: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`MultiStepLR.get_lr` for a count that may be a symbol."""

    def compared(scheduler: Any) -> Any:
        plain = scheduler.milestones
        if isinstance(scheduler.last_epoch, int | float):
            return get_lr(scheduler)
        scheduler.milestones = ComparedKeys(plain)
        try:
            return get_lr(scheduler)
        finally:
            scheduler.milestones = plain

    return compared
