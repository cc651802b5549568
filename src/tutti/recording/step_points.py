"""The points of a run's steps: few bytes at any length of the run.

Of the first `FULL` steps each is a point; of the next `2 FULL` two together are one, of the next `4 FULL`
four, and so on: a million steps are some 67,000 points. A point of several steps has their means, and the
last one's number.
"""

from __future__ import annotations

from collections.abc import Sequence

FULL = 10_000


class StepPoints:
    """Joins the steps of a long run to points, in order."""

    def __init__(self) -> None:
        self._num_points = 0
        self._group: list[Sequence[float]] = []

    def joined(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """The points that `rows` complete: step, time, seconds, values; of equal lengths."""
        made: list[list[float]] = []
        for row in rows:
            self._group.append(row)
            if len(self._group) >= 1 << (self._num_points // FULL):
                made.append(self._close())
        return made

    def rest(self) -> list[list[float]]:
        """A last point, of the steps that complete none."""
        return [self._close()] if self._group else []

    def _close(self) -> list[float]:
        group, self._group = self._group, []
        self._num_points += 1
        last = group[-1]
        if len(group) == 1:
            return list(last)
        means = [sum(column) / len(group) for column in list(zip(*group, strict=True))[2:]]
        return [last[0], last[1], *means]
