"""Layouts ranked by predicted time, those that fit first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tutti.errors import LayoutError, PlanError, ScheduleError, ShardingError
from tutti.layout import Layout
from tutti.planner.estimates.layout_estimate import Estimate
from tutti.planner.search.surely_too_large import SurelyTooLargeError
from tutti.propagate.idle_axes import IdleAxisError
from tutti.quantities import format_nbytes

# Layouts at the top of the table that get a better estimate.
NUM_REFINED = 24
# Layouts whose order the noise of timings may have decided: within this factor of the fastest.
_CLOSE = 1.2


@dataclass(frozen=True)
class RankedLayout:
    """A layout and its estimate. `fits`: its peak is within the capacity of a device."""

    estimate: Estimate
    fits: bool

    @property
    def layout(self) -> str:
        """Its text; "" is one device."""
        return str(self.estimate.layout)


@dataclass(frozen=True)
class Ranking:
    """Every layout of a step.

    rows: those that fit, the fastest first; then those that do not, the smallest first.
    refused: layouts that the step does not allow, with the reason.
    capacity: bytes of a device that a step may use.
    left_out: layouts with an axis that splits nothing, with the reason.
    beyond: layouts without an estimate that do not fit with smaller micro-batches either, with the reason.
    """

    rows: tuple[RankedLayout, ...]
    refused: tuple[tuple[str, str], ...]
    capacity: float
    left_out: tuple[tuple[str, str], ...] = ()
    beyond: tuple[tuple[str, str], ...] = ()

    def merged(self, other: Ranking) -> Ranking:
        """With the layouts of another ranking of the same step."""
        rows = tuple(_sorted([*self.rows, *other.rows]))
        refused, left_out = self.refused + other.refused, self.left_out + other.left_out
        return Ranking(rows, refused, self.capacity, left_out, self.beyond + other.beyond)

    @property
    def best(self) -> RankedLayout:
        """The fastest layout that fits.

        Raises:
            PlanError: none fits; says how many bytes are missing, and an estimate of the devices needed.
        """
        if self.rows and self.rows[0].fits:
            return self.rows[0]
        if not self.rows:
            against = (*self.refused, *self.left_out, ("", "there is no layout"))
            layout, why = against[0]
            raise PlanError("the step allows none of the layouts", at=layout, why=why)
        least = self.rows[0]
        over = least.estimate.peak_nbytes - self.capacity
        factor = math.ceil(least.estimate.peak_nbytes / self.capacity)
        raise PlanError(
            f'no layout fits: the smallest, "{least.layout or "one device"}", needs '
            f"{format_nbytes(over)} more on a device",
            why=f"its peak is {format_nbytes(least.estimate.peak_nbytes)}, a device has "
            f"{format_nbytes(self.capacity)} for a step",
            fix=f"about {factor} times as many devices, devices with more memory, or a smaller batch",
        )

    def row(self, layout: str) -> RankedLayout:
        """The row of a layout by its text.

        Raises:
            PlanError: it is not among the layouts.
        """
        wanted = str(Layout.parse(layout))
        for row in self.rows:
            if row.layout == wanted:
                return row
        own = dict(self.refused + self.left_out + self.beyond)
        raise PlanError(
            f'no estimate of layout "{wanted}"',
            why=own.get(wanted, "it is not among the layouts of this plan"),
        )


@dataclass(frozen=True)
class Refinement:
    """A better estimate of a layout, and the rows of the table that get it.

    ahead: called with all layouts whose rows are to get it, before any does; without it a row that an earlier
    one displaces gets none.
    """

    of: Callable[[Layout], Estimate]
    among: Callable[[Sequence[RankedLayout]], Iterable[RankedLayout]]
    ahead: Callable[[Sequence[Layout]], object] | None = None


def first_pipelines(rows: Sequence[RankedLayout]) -> Iterable[RankedLayout]:
    """Pipelines that fit, of the first `NUM_REFINED` rows."""
    return (r for r in rows[:NUM_REFINED] if r.fits and "pipe" in r.estimate.layout.axes)


def first_fitting(rows: Sequence[RankedLayout]) -> Iterable[RankedLayout]:
    """Layouts that fit, of the first `NUM_REFINED` rows."""
    return (r for r in rows[:NUM_REFINED] if r.fits)


def close_to_best(rows: Sequence[RankedLayout]) -> Iterable[RankedLayout]:
    """Layouts that fit and take little longer than the first, of the first `NUM_REFINED` rows."""
    most = _CLOSE * rows[0].estimate.seconds if rows else 0.0
    return (r for r in rows[:NUM_REFINED] if r.fits and r.estimate.seconds <= most)


def ranked(
    layouts: Iterable[Layout],
    estimate: Callable[[Layout], Estimate],
    capacity: float,
    *,
    refined: Refinement | None = None,
    paced: Callable[[Estimate], Estimate] = lambda made: made,
    seen: Callable[[Layout], object] = lambda _: None,
) -> Ranking:
    """Estimate every layout.

    Args:
        layouts: to compare.
        estimate: of a layout; it may refuse it.
        capacity: bytes of a device that a step may use.
        refined: a better estimate for some of the rows.
        paced: an estimate at the machine's speed, which is known when every layout has one.
        seen: called before each, for a progress bar.
    """
    rows: list[RankedLayout] = []
    refused: list[tuple[str, str]] = []
    left_out: list[tuple[str, str]] = []
    beyond: list[tuple[str, str]] = []
    for layout in layouts:
        seen(layout)
        try:
            made = estimate(layout)
        except IdleAxisError as error:
            left_out.append((str(layout), error.what))
        except SurelyTooLargeError as error:
            beyond.append((str(layout), error.what))
        except (LayoutError, ShardingError, ScheduleError) as error:
            refused.append((str(layout), error.what))
        else:
            rows.append(RankedLayout(made, made.peak_nbytes <= capacity))
    rows = _sorted([replace(row, estimate=paced(row.estimate)) for row in rows])
    if refined is not None:
        rows = _with_refined(rows, refined, paced, capacity, refused)
    return Ranking(tuple(rows), tuple(refused), capacity, tuple(left_out), tuple(beyond))


def _with_refined(
    rows: list[RankedLayout],
    refined: Refinement,
    paced: Callable[[Estimate], Estimate],
    capacity: float,
    refused: list[tuple[str, str]],
) -> list[RankedLayout]:
    """Refine rows until all that are to be are; a row whose program is refused goes to `refused`."""
    done: set[str] = set()
    while left := [row for row in refined.among(rows) if row.layout not in done]:
        if refined.ahead is None:
            left = left[:1]
        else:
            refined.ahead([row.estimate.layout for row in left])
        for row in left:
            done.add(row.layout)
            rows = [r for r in rows if r is not row]
            try:
                made = paced(refined.of(row.estimate.layout))
            except (LayoutError, ShardingError, ScheduleError) as error:
                refused.append((row.layout, error.what))
            else:
                rows.append(RankedLayout(made, made.peak_nbytes <= capacity))
        rows = _sorted(rows)
    return rows


def _sorted(rows: Sequence[RankedLayout]) -> list[RankedLayout]:
    """Of equal times the layout with less memory, then the shorter text."""
    fit = sorted(
        (r for r in rows if r.fits),
        key=lambda r: (r.estimate.seconds, r.estimate.peak_nbytes, len(r.layout), r.layout),
    )
    rest = sorted((r for r in rows if not r.fits), key=lambda r: (r.estimate.peak_nbytes, r.layout))
    return fit + rest
