"""The sentence below two layouts side by side: what the faster one needs less, and what it pays for that."""

from __future__ import annotations

from tutti.layout import Layout
from tutti.planner.estimates.layout_estimate import Estimate
from tutti.planner.search.ranking import RankedLayout
from tutti.report.plan_table import compared


def ranked(layout: str, **milliseconds: float) -> RankedLayout:
    kinds = {kind: ms / 1e3 for kind, ms in milliseconds.items()}
    made = Estimate(Layout.parse(layout), sum(kinds.values()), kinds, 0.0, {}, 1000)
    return RankedLayout(made, fits=True)


def sentence(first: RankedLayout, second: RankedLayout) -> str:
    return compared(first, second).splitlines()[-1]


ALONE = ranked("", compute=10)
PIPELINE = ranked("pipe=4 micro=4", compute=5, idle=3, messages=1, collectives=0.1)


def test_what_the_faster_layout_pays_is_told() -> None:
    assert sentence(PIPELINE, ALONE) == (
        "pipe=4 micro=4 is 1.1 times as fast as (one device): it needs 5 ms less for compute, and 3 ms more "
        "for idle and 1 ms more for messages."
    )
    assert sentence(ALONE, PIPELINE) == sentence(PIPELINE, ALONE)


def test_a_faster_layout_that_pays_little() -> None:
    data = ranked("data=4", compute=4, collectives=0.2)
    assert sentence(data, ALONE).endswith("it needs 6 ms less for compute.")
