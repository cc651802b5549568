"""The steps of a run in order, put together from the records of one process and of its earlier starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tutti.report.page.run_records import Event, ProcessRecords, Start


@dataclass(frozen=True)
class StepSeries:
    """The points of one step of `tutti.distribute`.

    Args:
        told: its record: function, model, optimizers, layout.
        names: of the returned scalars.
        points: step, seconds since the process began, seconds of the step (NaN for a call that made a
            program), and a value for each name.
    """

    told: Event
    names: tuple[str, ...]
    points: tuple[tuple[float, ...], ...]

    @property
    def trains(self) -> bool:
        """Whether it has an optimizer."""
        return bool(self.told.get("optimizers"))

    @property
    def title(self) -> str:
        """The function, and its model."""
        return f"{self.told.get('function', 'step')} of {self.told.get('model', 'the model')}"

    def values(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of one scalar."""
        at = 3 + self.names.index(name)
        return [(p[0], p[at]) for p in self.points]

    @property
    def seconds(self) -> list[tuple[float, float]]:
        """(step, seconds) of calls that neither made a program nor were measured."""
        return [(p[0], p[2]) for p in self.points if math.isfinite(p[2])]

    @property
    def median_seconds(self) -> float | None:
        """The median of `seconds`."""
        found = [s for _, s in self.seconds]
        return median(found) if found else None


def series_of(process: ProcessRecords) -> list[StepSeries]:
    """The steps of a process; a run that went on from a checkpoint continues those of its earlier starts."""
    made = {one.told["of"]: one for one in _of_start(process.last)}
    for start in reversed(process.earlier):
        before = {one.told["of"]: one for one in _of_start(start)}
        for number, one in made.items():
            if number in before:
                made[number] = _continued(before[number], one)
    return list(made.values())


def _continued(before: StepSeries, one: StepSeries) -> StepSeries:
    first = one.points[0][0] if one.points else 0.0
    if first <= 1 or before.names != one.names:
        return one  # it began anew
    kept = tuple(p for p in before.points if p[0] < first)
    return StepSeries(one.told, one.names, kept + one.points)


def _of_start(start: Start) -> list[StepSeries]:
    found = []
    for told in (r for r in start.of("step") if "of" in r):
        made = {r.get("step") for r in start.of("program") if r.get("of") == told["of"]}
        names, points = _points([r for r in start.of("steps") if r.get("of") == told["of"]])
        timed = [p if p[0] not in made else (*p[:2], math.nan, *p[3:]) for p in points]
        found.append(StepSeries(told, names, tuple(timed)))
    return found


def _points(
    records: Sequence[Event],
) -> tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]:
    """The names of the last records, and the points that have a value for each."""
    names = tuple(map(str, records[-1].get("names", ()))) if records else ()
    found: list[tuple[float, ...]] = []
    for r in records:
        if tuple(map(str, r.get("names", ()))) == names:
            found += [tuple(map(float, p)) for p in r.get("points", ())]
    return names, tuple(p for p in found if len(p) == 3 + len(names))
