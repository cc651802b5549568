"""The page `chosen_layouts.md`: the method in words, and the tables of one run."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.choice_statistics import Answer, Placed, choice_table, place_table, summary
from benchmarks.machine import describe

_BUSY = 0.5  # load before the run from which other work has a part in the times


def page(
    answers: Sequence[Answer],
    places: Sequence[Placed],
    factor: float,
    load: float,
    minutes: float,
) -> str:
    """The whole page.

    Args:
        answers: of all questions; places: of the examples.
        factor: of the best prediction, within which layouts were measured.
        load: of the machine before the run; minutes: that it took.
    """
    return f"""# Chosen layouts

`python -m benchmarks.chosen_layouts --write` made this page in {minutes:.0f} minutes: the layout that the
planner chooses for this machine, next to the fastest one that was measured. {_where(load)}

{summary(answers)}

{choice_table(answers)}

- A bound is 60 % of the peak that `data` (one device, for one rank) is predicted to need, or 5 % above the
  least peak of all layouts, if that is more. Layouts fit by their predicted peak.
- Measured are the layouts that fit and are predicted within {factor:g} times the best prediction; the table
  counts them. Two rounds find the fastest three beside the chosen one. The final rounds of these four alone
  make the figures, so a lucky turn among many layouts does not become the best.
- Every rank has one thread. In a round each layout has one turn, on all its ranks; the order changes from
  round to round. A turn is a median of its steps on the slowest rank. A ratio is the median over the rounds
  of chosen / other within a round; the best layout is the one with the largest.
- One calibration, at the start, into a folder of its own. Kernels are timed as in `tutti plan`: programs
  whose kernels three others have are not.
- With 4 ranks on 2 processors ranks take turns: times are those of such a machine, not of one with 4.

## Placement by hand and found

The steps of `examples/` in their own sizes, under the `place` of the example, and without one: tutti then
finds the placement.

{place_table(places)}
"""


def _where(load: float) -> str:
    here = describe()
    note = ": other work had a part in these times" if load > _BUSY else ""
    cores = f"{here['processor']}, {here['cores']} processors"
    return f"The machine: {cores}; load before the run {load:.1f}{note}."
